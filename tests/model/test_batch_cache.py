"""A cache of several sequences is as many caches of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.model.kv_cache import BatchCache, KVCache
from falcon_lab.tree import TokenTree, ancestor_matrix
from tiny_models import FAMILIES, tiny_target

LAYERS, HEADS, SIZE, CAPACITY = 2, 2, 3, 24


def states(*numbers: list[int]) -> Tensor:
    """``[R, G, n, D]``, each entry telling its number, head and place in the head."""
    rows = torch.tensor(numbers, dtype=torch.float32)[:, None, :, None]
    return 100 * rows + 10 * torch.arange(HEADS)[:, None, None] + torch.arange(SIZE)


def write(cache: KVCache, *numbers: list[int]) -> tuple[Tensor, Tensor]:
    found = None
    for layer in range(LAYERS):
        found = cache.update(states(*numbers), -states(*numbers), layer)
    assert found is not None
    return found


class Model:
    """What the places should hold, as lists."""

    def __init__(self, rows: int) -> None:
        self.cache = BatchCache(LAYERS, rows, CAPACITY)
        self.held: list[list[int]] = []
        self.next = 0

    def numbers(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def fill(self, row: int, count: int) -> None:
        numbers = self.numbers(count)
        own = self.cache.open(row)
        write(own, numbers[: count // 2])
        write(own, numbers[count // 2 :])
        self.cache.fill(row, own.length)
        self.held[row : row + 1] = [numbers]

    def round(self, paths: list[list[int]], width: int) -> None:
        new = [self.numbers(width) for _ in self.held]
        self.cache.begin()
        keys, values = write(self.cache, *new)
        assert keys.shape[2] == max(map(len, self.held)) + width
        for row, (held, added) in enumerate(zip(self.held, new, strict=True)):
            together = held + added
            assert torch.equal(keys[row, :, : len(together)], states(together)[0])
            assert torch.equal(values[row, :, : len(together)], -states(together)[0])
        self.cache.commit(self.cache.lengths, paths)
        for held, added, path in zip(self.held, new, paths, strict=True):
            held += [added[node] for node in path]

    def drop(self, row: int) -> None:
        self.cache.drop(row)
        last = self.held.pop()
        if row < len(self.held):
            self.held[row] = last

    def check(self) -> None:
        assert self.cache.lengths == [len(held) for held in self.held]
        self.round([[] for _ in self.held], 1)


@given(st.data())
def test_sequences_are_filled_extended_and_dropped_without_touching_each_other(data: Any) -> None:
    model = Model(3)
    count = data.draw(st.integers(1, 3))
    for row in range(count):
        model.fill(row, data.draw(st.integers(2, 6)))
    for _ in range(3):
        width = data.draw(st.integers(1, 4))
        nodes = st.sets(st.integers(1, width - 1)) if width > 1 else st.just(set[int]())
        model.round([[0, *sorted(data.draw(nodes))] for _ in model.held], width)
        model.check()
        change = data.draw(st.sampled_from(["none", "fill", "drop"]))
        row = data.draw(st.integers(0, len(model.held) - 1))
        if change == "fill":
            model.fill(row, data.draw(st.integers(2, 6)))
        if change == "drop" and len(model.held) > 1:
            model.drop(row)
        model.check()


def test_a_pass_may_be_for_some_sequences_and_begin_before_their_end() -> None:
    cache = BatchCache(LAYERS, 3, CAPACITY)
    cache.begin([0, 1, 2], [0, 0, 0])
    write(cache, [1, 2, 3], [4, 5, 6], [7, 8, 9])
    cache.begin([2, 0], [3, 1])
    keys, _ = write(cache, [10, 11], [12, 13])
    assert torch.equal(keys[0], states([7, 8, 9, 10, 11])[0])
    assert torch.equal(keys[1, :, :3], states([1, 12, 13])[0])
    cache.begin([1], [2])
    keys, _ = write(cache, [14])
    assert torch.equal(keys[0], states([4, 5, 14])[0])


def test_positions_are_kept_for_every_sequence() -> None:
    cache = BatchCache(LAYERS, 2, CAPACITY)
    for row, positions in enumerate(([0, 1, 2], [0])):
        own = cache.open(row)
        own.record_positions(torch.tensor([positions]))
        write(own, positions)
        cache.fill(row, own.length)
    cache.begin()
    found = cache.record_positions(torch.tensor([[3, 4, 4], [1, 2, 2]]))
    write(cache, [3, 4, 5], [1, 2, 3])
    assert found[0].tolist() == [0, 1, 2, 3, 4, 4]
    assert found[1, :4].tolist() == [0, 1, 2, 2]
    cache.commit(cache.lengths, [[0, 2], [0]])
    cache.drop(0)
    cache.begin()
    assert cache.record_positions(torch.tensor([[2]])).tolist() == [[0, 1, 2]]


def test_too_long_a_sequence_is_refused() -> None:
    cache = BatchCache(LAYERS, 2, 4)
    cache.begin([0, 1], [1, 3])
    with pytest.raises(FalconLabError, match="holds 4 positions of a sequence and 5"):
        write(cache, [1, 2], [3, 4])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_of_a_targets_cache_is_known_beforehand(family: str) -> None:
    target = tiny_target(family)
    cache = target.new_batch_cache(3, 20)
    for row, length in enumerate((4, 2)):
        own = cache.open(row)
        target.prefill(torch.arange(1, length + 1), own)
        cache.fill(row, own.length)
    target.step_batch(torch.tensor([1, 2]), cache)
    assert cache.nbytes == target.backbone.layout.bytes(20, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_are_verified_as_if_each_were_alone(family: str) -> None:
    target = tiny_target(family)
    shapes = [[-1, 0, 0, 1], [-1], [-1, 0, 1, 2, 0, 4]]
    trees = [a_tree(parents, 10 + number) for number, parents in enumerate(shapes)]
    prompts = [torch.arange(1, 4), torch.arange(5, 16), torch.arange(20, 25)]
    cache, alone = target.new_batch_cache(3, 32), []
    for row, prompt in enumerate(prompts):
        own = cache.open(row)
        target.prefill(prompt, own)
        cache.fill(row, own.length)
        single = target.new_cache(32)
        target.prefill(prompt, single)
        alone.append(target.verify(trees[row], single))
    found = target.verify_batch(trees, cache)
    for part in ("logits", "features"):
        expected = torch.cat([getattr(output, part) for output in alone])
        torch.testing.assert_close(getattr(found, part), expected, rtol=1e-4, atol=1e-4)


def test_a_tree_beyond_the_last_position_is_refused() -> None:
    target = tiny_target("llama")
    cache = target.new_batch_cache(1, target.max_positions + 4)
    own = cache.open(0)
    target.prefill(torch.ones(target.max_positions - 1, dtype=torch.long), own)
    cache.fill(0, own.length)
    target.verify_batch([a_tree([-1], 1)], cache)
    with pytest.raises(FalconLabError, match="beyond"):
        target.verify_batch([a_tree([-1, 0], 1)], cache)


def a_tree(parents: list[int], seed: int) -> TokenTree:
    above, depth = torch.tensor(parents), [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (len(parents),), generator=generator)
    nothing = torch.zeros(len(parents))
    return TokenTree(
        tokens, above, torch.tensor(depth), ancestor_matrix(above), "deterministic", nothing
    )
