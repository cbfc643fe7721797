"""Prompts of different lengths, decoded side by side and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fakes.decoding import generate
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.sampling import Sampling

PROMPTS = ([5, 9, 3], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [4, 4], [9, 8, 7, 6, 5])
NEW = 14

Prompts = Sequence[Sequence[int]]


def together(
    engine: Any,
    rows: int,
    prompts: Prompts = PROMPTS,
    new: int = NEW,
    *,
    stop: StopCondition | None = None,
    **sampling: Any,
) -> list[Generation]:
    """Each prompt's seed is its number."""
    found: list[Generation] = engine.generate_batch(
        [torch.tensor(prompt, dtype=torch.long) for prompt in prompts],
        batch_size=rows,
        max_new_tokens=new,
        sampling=Sampling(**sampling),
        generators=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        stop=stop or StopCondition(),
    )
    return found


def one_by_one(
    engine: Any, prompts: Prompts = PROMPTS, new: int = NEW, **settings: Any
) -> list[Generation]:
    """The same through the engine for one sequence."""
    return [
        generate(engine, prompt, new, seed=seed, **settings) for seed, prompt in enumerate(prompts)
    ]


def same_texts(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    assert [(one.tokens, one.finish) for one in ours] == [
        (one.tokens, one.finish) for one in theirs
    ]


def same_rounds(ours: Sequence[Generation], theirs: Sequence[Generation]) -> None:
    """The texts, and every round of them."""
    same_texts(ours, theirs)
    assert [one.rounds for one in ours] == [one.rounds for one in theirs]
