from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.trees import prefix_closed
from falcon_lab.errors import FalconLabError
from falcon_lab.trees.layout import Layout, build_layout
from falcon_lab.trees.templates import named

BLOCKS = st.integers(1, 4)


def blocks_at(layout: Layout, depth: int) -> list[Any]:
    """Paths of the nodes of that depth which have children, in order."""
    return [
        path
        for path in layout.paths
        if len(path) == depth and any(other[:-1] == path for other in layout.paths if other)
    ]


def check(layout: Layout, block: int) -> None:
    """Every buffer, node by node, from what the words say."""
    paths = layout.paths
    for node, path in enumerate(paths):
        assert layout.depth[node] == len(path)
        assert layout.parents[node] == (paths.index(path[:-1]) if path else -1)
        for other, above in enumerate(paths):
            assert layout.ancestors[node, other] == (path[: len(above)] == above)
        route = [paths.index(path[:depth]) for depth in range(len(path) + 1)]
        rest = layout.routes.shape[1] - len(route)
        assert layout.routes[node].tolist() == route + [node] * rest
    assert layout.routes.shape[1] == max(map(len, paths)) + 1
    assert len(layout.passes) == -(-max(map(len, paths)) // block)
    decided = 1
    for number, plan in enumerate(layout.passes):
        start = number * block
        stands = blocks_at(layout, start)
        assert plan.first == decided
        decided = plan.last
        assert [paths[node] for node in plan.stands.tolist()] == stands
        if number:
            before = blocks_at(layout, start - block)
            assert plan.parents.tolist() == [before.index(path[: start - block]) for path in stands]
            assert [[paths[node] for node in row] for row in plan.path.tolist()] == [
                [path[:depth] for depth in range(start - block + 1, start + 1)] for path in stands
            ]
        else:
            assert plan.parents.tolist() == [-1]
            assert plan.path.shape == (1, 0)
        for place, node in enumerate(range(plan.first, plan.last)):
            level = len(paths[node])
            ancestor = paths[node][: (level - 1) // block * block]
            row = stands.index(ancestor) * block + (level - 1) % block
            assert plan.rows[place] == row
            assert plan.slots[place] == row * plan.width + paths[node][-1]
    assert decided == len(paths)


@given(prefix_closed(), BLOCKS)
def test_every_buffer_equals_the_slow_reading_of_the_rule(paths: list[Any], block: int) -> None:
    check(build_layout(paths, block), block)


@pytest.mark.parametrize("name", ["vicuna", "llama", "k3", "k4", "auto"])
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_the_shipped_trees_do_so_for_every_block_size(name: str, block: int) -> None:
    check(build_layout(named(name, block), block), block)


@given(prefix_closed(), BLOCKS, st.randoms())
def test_the_order_in_which_nodes_are_listed_does_not_matter(
    paths: list[Any], block: int, random: Any
) -> None:
    shuffled = random.sample(paths, len(paths))
    assert repr(build_layout(shuffled, block)) == repr(build_layout(paths, block))


def test_no_nodes_are_the_root_alone() -> None:
    layout = build_layout([], 2)
    assert layout.paths == ((),)
    assert layout.passes == ()
    assert layout.ancestors.tolist() == [[True]]


@pytest.mark.parametrize("nodes", [[(0,), (0,)], [(0, 0)], [(1,)]])
def test_what_is_no_tree_gets_no_buffers(nodes: list[Any]) -> None:
    with pytest.raises(FalconLabError, match="tree node"):
        build_layout(nodes, 2)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        build_layout([(0,)], 0)


def test_all_buffers_move_to_a_device() -> None:
    layout = build_layout(named("vicuna", 2), 2).to(torch.device("meta"))
    tensors = [layout.parents, layout.depth, layout.ancestors]
    for plan in layout.passes:
        tensors += [plan.stands, plan.path, plan.parents, plan.slots, plan.rows]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
