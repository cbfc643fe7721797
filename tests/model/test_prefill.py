"""Prompts read in chunks, against the same prompts read in one pass."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from falcon_lab.errors import FalconLabError
from falcon_lab.model.target import Target
from tiny_models import FAMILIES, POSITIONS, tiny_target
from watching import Largest

ATOL = 2e-4
LENGTH = 23


@cache
def target_of(family: str, *, lean: bool = False) -> Target:
    made = tiny_target(family)
    return Target(made.model, made.tokenizer, name=family, lean=lean)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(chunk=st.integers(1, LENGTH + 1), before=st.integers(0, 5))
def test_chunks_give_the_features_and_last_logits_of_the_whole(
    family: str, lean: bool, chunk: int, before: int
) -> None:
    target, tokens = target_of(family, lean=lean), prompt(LENGTH)
    found = []
    for size in (chunk, LENGTH):
        kv = target.new_cache(LENGTH)
        if before:
            target.prefill(tokens[:before], kv)
        found.append(target.prefill(tokens[before:], kv, chunk=size))
        assert kv.length == LENGTH
    ours, whole = found
    torch.testing.assert_close(ours.features, whole.features, atol=ATOL, rtol=0)
    torch.testing.assert_close(ours.logits, whole.logits, atol=ATOL, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_passes_come_one_by_one_in_the_order_of_the_text(family: str) -> None:
    target, tokens = target_of(family), prompt(LENGTH)
    kv = target.new_cache(LENGTH)
    whole = target.prefill(tokens, target.new_cache(LENGTH)).features
    done = 0
    for output in target.read(tokens, kv, chunk=10):
        new = output.features.shape[0]
        assert new == min(10, LENGTH - done)
        assert kv.length == done + new
        assert output.logits.shape == (1, 64)
        expected = whole[done : done + new]
        torch.testing.assert_close(output.features, expected, atol=ATOL, rtol=0)
        torch.testing.assert_close(output.logits, target.head(expected[-1:]), atol=ATOL, rtol=0)
        done += new
    assert done == LENGTH


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("lean", [False, True])
def test_nothing_grows_with_the_square_of_the_prompt(family: str, lean: bool) -> None:
    target, chunk, found = target_of(family, lean=lean), 8, []
    for length in (POSITIONS // 2, POSITIONS):
        watched = Largest()
        kv = target.new_cache(length)
        target.prefill(prompt(1), kv)  # takes the cache's memory
        kv.reset()
        with watched:
            for _ in target.read(prompt(length), kv, chunk=chunk):
                pass
        found.append(watched.elements)
    assert found[1] <= 2.2 * found[0]


def test_a_prompt_beyond_the_last_position_is_refused_before_any_of_it_is_read() -> None:
    target = target_of("llama")
    kv = target.new_cache(POSITIONS + 8)
    with pytest.raises(FalconLabError, match=f"beyond llama's {POSITIONS} positions"):
        target.prefill(prompt(POSITIONS + 1), kv, chunk=4)
    assert kv.length == 0
