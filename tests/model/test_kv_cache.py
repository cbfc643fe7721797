"""The cache alone: states in, states kept, states dropped."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fakes.waits import watched
from falcon_lab.errors import FalconLabError
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.kv_layout import KVLayout, LayerKV

LAYERS, CAPACITY = 3, 16


def rows(start: int, count: int, layer: int = 0, size: int = 4) -> Tensor:
    """``[1, 2, count, size]`` rows that tell where they were written."""
    marks = torch.arange(start, start + count).float() + 100 * layer
    return marks[None, None, :, None].expand(1, 2, count, size)


def filled(count: int) -> KVCache:
    cache = KVCache(LAYERS, CAPACITY)
    append(cache, count)
    return cache


def append(cache: KVCache, count: int) -> list[tuple[Tensor, Tensor]]:
    start = cache.length
    return [
        cache.update(rows(start, count, layer), -rows(start, count, layer), layer)
        for layer in range(LAYERS)
    ]


def marks(cache: KVCache, layer: int) -> list[float]:
    """What the valid rows of a layer are marked with (checked to agree in keys and values)."""
    kept = cache._states[layer]
    assert kept is not None
    keys, values = (tensor[0, 0, : cache.length, 0] for tensor in kept)
    assert torch.equal(keys, -values)
    return (keys - 100 * layer).tolist()


def test_states_are_appended_to_every_layer_and_all_of_them_are_returned() -> None:
    cache = filled(5)
    for layer, (keys, values) in enumerate(append(cache, 2)):
        assert torch.equal(keys, rows(0, 7, layer))
        assert torch.equal(values, -rows(0, 7, layer))
    assert cache.length == cache.get_seq_length() == 7


def test_memory_is_taken_once_and_states_are_written_in_place() -> None:
    cache = filled(1)
    before = [kept[0].data_ptr() for kept in cache._states if kept]
    append(cache, 9)
    cache.truncate(2)
    append(cache, 1)
    assert before == [kept[0].data_ptr() for kept in cache._states if kept]


@given(data=st.data())
def test_commit_keeps_the_path_and_drops_the_rest_of_the_tree(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, 6))
    nodes = data.draw(st.integers(1, 8))
    path = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
    cache = filled(start + nodes)
    cache.commit([start], [path])
    expected = [*range(start), *(start + node for node in path)]
    for layer in range(LAYERS):
        assert marks(cache, layer) == expected
    assert cache.length == start + len(path)


def test_an_empty_path_keeps_nothing_of_the_tree() -> None:
    cache = filled(9)
    cache.commit([4], [[]])
    assert marks(cache, 1) == [0, 1, 2, 3]


def test_states_after_a_commit_follow_the_path() -> None:
    cache = filled(8)
    cache.commit([4], [[0, 3]])
    append(cache, 1)
    assert marks(cache, 2) == [0, 1, 2, 3, 4, 7, 6]


def test_positions_move_with_their_states() -> None:
    cache = filled(4)
    assert cache.record_positions(torch.tensor([[4, 5, 5, 6]])).tolist()[0][4:] == [4, 5, 5, 6]
    append(cache, 4)
    cache.commit([4], [[0, 2, 3]])
    assert cache.record_positions(torch.tensor([[7]])).tolist()[0][4:] == [4, 5, 6, 7]


def test_truncate_drops_the_newest_positions_and_refuses_to_grow() -> None:
    cache = filled(6)
    cache.truncate(2)
    assert marks(cache, 0) == [0, 1]
    with pytest.raises(FalconLabError, match="cannot cut the KV cache's 2 positions to 3"):
        cache.truncate(3)


def test_reset_forgets_all_positions() -> None:
    cache = filled(6)
    cache.reset()
    append(cache, 2)
    assert marks(cache, 0) == [0, 1]


def test_one_position_too_many_is_refused_before_anything_is_written() -> None:
    cache = filled(CAPACITY)
    with pytest.raises(FalconLabError, match=f"holds {CAPACITY} positions and 17 are needed"):
        append(cache, 1)
    assert cache.length == CAPACITY


def test_layers_of_different_shapes_share_one_cache() -> None:
    cache = KVCache(2, CAPACITY)
    cache.update(rows(0, 5), -rows(0, 5), 0)
    wide = rows(0, 5, 1, size=6)
    cache.update(wide, -wide, 1)
    cache.commit([2], [[0, 2]])
    assert marks(cache, 0) == marks(cache, 1) == [0, 1, 2, 4]


def test_a_cache_made_under_inference_mode_is_usable_outside_it() -> None:
    with torch.inference_mode():
        cache = filled(3)
    append(cache, 2)
    cache.commit([2], [[0, 2]])
    assert marks(cache, 0) == [0, 1, 2, 4]


def test_memory_is_handed_over_and_the_cache_before_is_left_with_nothing() -> None:
    before = filled(5)
    before.record_positions(torch.arange(2)[None])
    addresses = [kept[0].data_ptr() for kept in before._states if kept]
    taken = before.nbytes
    after = before.hand_over()
    assert (after.length, after.capacity, after.nbytes) == (0, CAPACITY, taken)
    assert (before.length, before.nbytes, before.positions) == (0, 0, None)
    append(after, 3)
    assert addresses == [kept[0].data_ptr() for kept in after._states if kept]
    assert marks(after, 2) == [0, 1, 2]
    with pytest.raises(FalconLabError, match="handed over to another sequence"):
        append(before, 1)
    assert (before.sequences, after.sequences) == (0, 1)


def test_nobody_waits_for_a_path_that_is_on_the_device() -> None:
    for path in ([0, 1, 2], [0, 2, 3]):
        cache, known = filled(8), filled(8)
        cache.commit([4], [path])
        nodes = torch.tensor(path)
        with watched() as waits:
            known.commit([4], [path], [nodes])
        assert waits == []
        assert marks(known, 1) == marks(cache, 1)


# --- growing -------------------------------------------------------------------------------------

LAYOUT = KVLayout((LayerKV((2, 4), (2, 4), torch.float32),) * 2)


def growing(capacity: int, most: int, count: int) -> tuple[KVCache, torch.Tensor]:
    cache = KVCache(2, capacity, LAYOUT, most)
    states = torch.randn(1, 2, count, 4)
    for layer in range(2):
        cache.update(states, -states, layer)
    return cache, states


@given(first=st.integers(1, 40), asked=st.lists(st.integers(1, 200), max_size=6))
def test_it_doubles_up_to_a_bound_and_gstates_no_further_than_needed(
    first: int, asked: list[int]
) -> None:
    cache, states = growing(first, 100, 1)
    for count in asked:
        before = cache.capacity
        assert cache.reserve(count) == (count > before)
        assert cache.capacity >= count
        assert cache.capacity in (before, count, min(2 * before, 100))
        assert cache.capacity <= max(100, first, *asked)
    cache.reserve(2)
    assert cache.nbytes == LAYOUT.bytes(cache.capacity)
    for layer in range(2):
        keys, values = cache.update(states, -states, layer)
        assert torch.equal(keys, torch.cat([states, states], dim=2))
        assert torch.equal(values, -keys)


def test_room_that_is_there_costs_nothing() -> None:
    cache, _ = growing(8, 100, 3)
    kept = cache._pools
    assert not cache.reserve(8)
    assert cache._pools is kept


def test_positions_of_states_with_a_window_stay_beside_them() -> None:
    layout = KVLayout(LAYOUT.layers, positions=True)
    cache = KVCache(2, 4, layout, 100)
    states, start = torch.randn(1, 2, 3, 4), 5
    for _ in range(3):
        cache.reserve(cache.length + 3)
        seen = cache.record_positions(torch.arange(start, start + 3)[None])
        for layer in range(2):
            cache.update(states, states, layer)
        start += 3
        assert seen.tolist() == [list(range(5, start))]
    assert cache.nbytes == layout.bytes(cache.capacity)
