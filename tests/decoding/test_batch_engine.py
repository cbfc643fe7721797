"""A row of a batch writes what it would write alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from fakes.decoding import generate as alone
from fakes.decoding import speculative
from fakes.knowing import KnowingDrafter
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.batch_engine import BatchEngine
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, tiny_target

PROMPTS = ([5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4, 4], [9, 8, 7, 6, 5])
NEW = 14


def together(
    engine: Any,
    rows: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    new: int = NEW,
    *,
    stop: StopCondition | None = None,
    **sampling: Any,
) -> list[Generation]:
    """Each prompt's seed is its number."""
    return BatchEngine(engine, rows).generate(
        [torch.tensor(prompt) for prompt in prompts],
        max_new_tokens=new,
        sampling=Sampling(**sampling),
        generators=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        stop=stop or StopCondition(),
    )


def one_by_one(engine: Any, new: int = NEW, **settings: Any) -> list[Generation]:
    return [
        alone(engine, prompt, new, seed=seed, **settings) for seed, prompt in enumerate(PROMPTS)
    ]


def same(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    assert [(one.tokens, one.finish) for one in ours] == [
        (one.tokens, one.finish) for one in theirs
    ]


@lru_cache
def target_of(family: str, lean: bool = False) -> Any:
    return tiny_target(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_plain_batch_writes_what_each_prompt_gives_alone(family: str, rows: int) -> None:
    engine = PlainEngine(target_of(family))
    stop = StopCondition({3, 17, 40})
    theirs = one_by_one(engine, stop=stop)
    assert len({len(one.tokens) for one in theirs}) > 1  # rows end at different times
    same(together(engine, rows, stop=stop), theirs)


def knowing(family: str, block: int, seed: int = 0) -> KnowingDrafter:
    texts = [[*prompt, *one.tokens] for prompt, one in zip(PROMPTS, alone_of(family), strict=True)]
    return KnowingDrafter(64, block, texts, seed=seed)


@lru_cache
def alone_of(family: str) -> list[Generation]:
    return one_by_one(PlainEngine(target_of(family)))


def equal(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    """The texts and every round of them."""
    same(ours, theirs)
    assert [one.rounds for one in ours] == [one.rounds for one in theirs]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_speculative_batch_writes_what_each_prompt_gives_alone(family: str, rows: int) -> None:
    engine = speculative(target_of(family), knowing(family, 2), named("k2-8", 2))
    ours = together(engine, rows)
    equal(ours, one_by_one(engine))
    same(ours, alone_of(family))
    assert sum(round_.accepted for one in ours for round_ in one.rounds) > 10
