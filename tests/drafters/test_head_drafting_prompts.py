"""A prompt that the drafter reads in parts, against the same prompt read in one pass."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from falcon_cases import drafter, rows
from falcon_lab.drafters import head_drafting
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import Frontier, Observation
from watching import Largest

ROOT = Frontier.root(torch.device("cpu"))
KINDS = [("block", "aligned"), ("block", "absolute"), ("newest", "aligned")]


def observed(made: FalconDrafter, parts: list[int], later: tuple[int, ...] = ()) -> list[Tensor]:
    """A prompt in parts, then rounds: the features of every pass."""
    prompt = sum(parts)
    tokens, features = rows(prompt + sum(later))
    made.reset(tokens[0])
    done = 0
    for part in parts:
        known = slice(done, done + part)
        done += part
        made.observe(Observation(tokens[known], features[known], remaining=prompt - done))
    found = _round(made)
    for new in later:
        made.observe(Observation(tokens[done : done + new], features[done : done + new]))
        done += new
        found += _round(made)
    return found


def _round(made: FalconDrafter) -> list[Tensor]:
    root = made.draft(ROOT)
    again = torch.tensor([[1] * made.block, [2] * made.block])
    below = made.draft(Frontier(again, torch.tensor([0, 0])))
    assert root.features is not None
    assert below.features is not None
    return [root.features, below.features]


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


@st.composite
def divided(draw: st.DrawFn) -> list[int]:
    """A prompt of up to 40 rows, in parts."""
    return draw(st.lists(st.integers(1, 13), min_size=1, max_size=6))


@pytest.mark.parametrize(("query", "phase"), KINDS)
@pytest.mark.parametrize("block", [1, 2, 3, 4])
@settings(max_examples=15)
@given(parts=divided(), before=st.integers(1, 5))
def test_a_prompt_in_parts_is_drafted_for_as_the_whole(
    block: int, query: str, phase: str, parts: list[int], before: int
) -> None:
    made = _made(block, query, phase)
    later = (before, 2 * block + 1)
    same(observed(made, parts, later), observed(made, [sum(parts)], later))


@pytest.mark.parametrize(("query", "phase"), KINDS)
@pytest.mark.parametrize("part", [1, 3])  # 3 is k
def test_parts_of_one_row_and_of_a_block_give_the_same(query: str, phase: str, part: int) -> None:
    made = _made(3, query, phase)
    parts = [part] * (24 // part)
    same(observed(made, parts, (2, 4)), observed(made, [24], (2, 4)))


@pytest.mark.parametrize(("query", "phase"), KINDS)
def test_one_long_observation_is_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, query: str, phase: str
) -> None:
    made = _made(3, query, phase)
    whole = observed(made, [50], (2, 4))
    monkeypatch.setattr(head_drafting, "PIECE", 7)
    calls: list[int] = []
    hook = made.backbone.register_forward_pre_hook(
        lambda _, __, given: calls.append(given["positions"].shape[1]), with_kwargs=True
    )
    with hook:
        same(observed(made, [50], (2, 4)), whole)
    assert len(calls) > 7
    assert max(calls) <= 7 + 3 * (3 - 1)  # a piece, what was left of the one before, and queries


def test_a_prompt_s_parts_may_follow_rounds() -> None:
    made = _made(2, "block", "aligned")
    tokens, features = rows(30)
    found = []
    for parts in ([15, 4, 6], [25]):
        made.reset(tokens[0])
        made.observe(Observation(tokens[:5], features[:5]))
        _round(made)
        done = 5
        for part in parts:
            known = slice(done, done + part)
            done += part
            made.observe(Observation(tokens[known], features[known], remaining=30 - done))
        found.append(_round(made))
    same(*found)


@pytest.mark.parametrize(("query", "phase"), KINDS)
def test_what_is_held_of_a_prompt_is_a_part_of_it(query: str, phase: str) -> None:
    made, length, part = _made(2, query, phase), 250, 8
    watched = Largest()
    with watched:
        observed(made, [part] * (length // part) + [2])
    assert watched.elements < length**2 / 3
    state = made._drafting._sequences[0]
    assert state.recent is not None
    assert state.recent.shape[1] <= 2
    assert not state.pending


@cache
def _made(block: int, query: str, phase: str) -> FalconDrafter:
    return drafter(block=block, query=query, phase=phase, layers=2)
