"""Greedy speculative decoding is plain decoding, on every family of targets."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.decoding import chain, generate, plain, speculative
from fakes.drafters import OracleDrafter
from fakes.trees import prefix_closed
from falcon_lab.trees.paths import Path
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, tiny_target

PROMPT = [5, 9, 3]
NEW = 16
SHIPPED = ["vicuna", "llama", "k3", "k4", "auto"]


@lru_cache
def target_and_truth(family: str) -> tuple[Any, tuple[int, ...]]:
    target = tiny_target(family)
    return target, (*PROMPT, *plain(target, PROMPT, NEW).tokens)


def accepted_while_equal(family: str, paths: Any, block: int, seed: int = 0) -> int:
    """Draft tokens accepted over a text that is asserted to be the plain one."""
    target, truth = target_and_truth(family)
    drafter = OracleDrafter(target.vocab_size, block, list(truth), seed=seed)
    out = generate(speculative(target, drafter, paths), PROMPT, NEW)
    assert (*PROMPT, *out.tokens) == truth
    return sum(round_.accepted for round_ in out.rounds)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_greedy_output_is_plain_decodings_for_every_tree(family: str, block: int) -> None:
    trees = {name: named(name, block) for name in SHIPPED} | {"chain": tuple(chain(2 * block))}
    accepted = {name: accepted_while_equal(family, paths, block) for name, paths in trees.items()}
    assert min(accepted.values()) > 0


@settings(max_examples=12, deadline=None)
@given(prefix_closed(), st.sampled_from(FAMILIES), st.integers(1, 4), st.integers(0, 99))
def test_and_for_any_tree_that_hypothesis_makes(
    paths: list[Path], family: str, block: int, seed: int
) -> None:
    accepted_while_equal(family, paths, block, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_gives_plain_decodings_sampled_text(family: str) -> None:
    target, truth = target_and_truth(family)
    drafter = OracleDrafter(target.vocab_size, 2, list(truth))
    engine = speculative(target, drafter, named("auto", 2))
    ours = generate(engine, PROMPT, NEW, seed=4, temperature=0.8)
    assert ours.tokens == plain(target, PROMPT, NEW, seed=4, temperature=0.8).tokens
