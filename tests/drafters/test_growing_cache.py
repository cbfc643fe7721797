from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.model.kv_cache import GrowingCache, KVLayout, LayerRows

LAYOUT = KVLayout((LayerRows((2, 4), (2, 4), torch.float32),) * 2)


def filled(capacity: int, most: int, count: int) -> tuple[GrowingCache, torch.Tensor]:
    cache = GrowingCache(2, capacity, LAYOUT, most)
    rows = torch.randn(1, 2, count, 4)
    for layer in range(2):
        cache.update(rows, -rows, layer)
    return cache, rows


@given(first=st.integers(1, 40), asked=st.lists(st.integers(1, 200), max_size=6))
def test_it_doubles_up_to_a_bound_and_grows_no_further_than_needed(
    first: int, asked: list[int]
) -> None:
    cache, rows = filled(first, 100, 1)
    for count in asked:
        before = cache.capacity
        assert cache.reserve(count) == (count > before)
        assert cache.capacity >= count
        assert cache.capacity in (before, count, min(2 * before, 100))
        assert cache.capacity <= max(100, first, *asked)
    cache.reserve(2)
    assert cache.nbytes == LAYOUT.bytes(cache.capacity)
    for layer in range(2):
        keys, values = cache.update(rows, -rows, layer)
        assert torch.equal(keys, torch.cat([rows, rows], dim=2))
        assert torch.equal(values, -keys)


def test_room_that_is_there_costs_nothing() -> None:
    cache, _ = filled(8, 100, 3)
    kept = cache._pools
    assert not cache.reserve(8)
    assert cache._pools is kept


def test_positions_of_rows_with_a_window_stay_beside_them() -> None:
    layout = KVLayout(LAYOUT.layers, positions=True)
    cache = GrowingCache(2, 4, layout, 100)
    rows, start = torch.randn(1, 2, 3, 4), 5
    for _ in range(3):
        cache.reserve(cache.length + 3)
        seen = cache.record_positions(torch.arange(start, start + 3)[None])
        for layer in range(2):
            cache.update(rows, rows, layer)
        start += 3
        assert seen.tolist() == [list(range(5, start))]
    assert cache.nbytes == layout.bytes(cache.capacity)
