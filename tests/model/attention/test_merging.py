"""Parts of attention, put together, against attention over all keys in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from falcon_lab.model.attention.backend import Partial
from falcon_lab.model.attention.merged import merge, with_tree

HEADS, ROWS, SIZE = 2, 3, 4


def states(count: int, seed: int, size: float = 1.0) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return size * torch.randn(1, HEADS, count, SIZE, generator=drawn)


def part(query: Tensor, keys: Tensor, values: Tensor) -> Partial:
    scores = query.double() @ keys.double().mT
    return Partial((scores.softmax(-1) @ values.double()).float(), scores.logsumexp(-1).float())


def close(one: Partial, other: Partial) -> bool:
    seen = torch.allclose(one.seen, other.seen, atol=1e-4)
    return seen and torch.allclose(one.lse, other.lse, rtol=1e-5, atol=1e-4)


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(0, 99),
    st.sampled_from([0.1, 1.0, 30.0]),
)
def test_any_cut_of_the_keys_gives_the_same_attention(
    cut: list[int], seed: int, size: float
) -> None:
    # At size 30 scores reach thousands, whose exponentials no float holds.
    query, keys = states(ROWS, seed, size), states(sum(cut), seed + 1, size)
    values = states(sum(cut), seed + 2)
    parts = [
        part(query, *pair) for pair in zip(keys.split(cut, 2), values.split(cut, 2), strict=True)
    ]
    forwards, backwards = parts[0], parts[-1]
    for one in parts[1:]:
        forwards = merge(forwards, one)
    for one in reversed(parts[:-1]):
        backwards = merge(one, backwards)
    assert close(forwards, part(query, keys, values))
    assert close(backwards, forwards)
    assert close(merge(parts[0], parts[1]), merge(parts[1], parts[0]))


def test_a_part_without_keys_changes_nothing() -> None:
    query = states(ROWS, 0)
    some = part(query, states(5, 1), states(5, 2))
    empty = Partial(torch.zeros_like(some.seen), torch.full_like(some.lse, -torch.inf))
    assert close(merge(some, empty), some)
    assert close(merge(empty, some), some)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_what_outweighs_all_else_is_what_is_seen(offset: float) -> None:
    seen = states(ROWS, 0)
    light = Partial(seen, torch.full((1, HEADS, ROWS), offset))
    heavy = Partial(seen + 1, torch.full((1, HEADS, ROWS), offset + 200))
    assert torch.equal(merge(light, heavy).seen, heavy.seen)
    assert torch.equal(merge(heavy, light).seen, heavy.seen)
    assert torch.isfinite(merge(light, heavy).lse).all()


def test_parts_in_half_precision_are_merged_in_single() -> None:
    parts = [part(states(ROWS, s), states(4, s + 1), states(4, s + 2)) for s in (0, 9)]
    halves = [Partial(one.seen.bfloat16(), one.lse) for one in parts]
    merged = merge(*halves)
    assert merged.seen.dtype == torch.float32
    exact = merge(*(Partial(one.seen.float(), one.lse) for one in halves))
    assert torch.equal(merged.seen, exact.seen)


@given(st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.1, 1.0, 30.0]))
def test_a_prefix_is_one_more_key_of_its_tree(prefix: int, seed: int, size: float) -> None:
    query, keys = states(ROWS, seed, size), states(prefix + ROWS, seed + 1, size)
    values = states(prefix + ROWS, seed + 2)
    before = part(query, keys[:, :, :prefix], values[:, :, :prefix])
    new = keys[:, :, prefix:], values[:, :, prefix:]
    everything = torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)
    seen = with_tree(before, query, *new, everything, scale=1.0)
    assert torch.allclose(seen, merge(before, part(query, *new)).seen, atol=1e-4)
