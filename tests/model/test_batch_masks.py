from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.trees import prefix_closed
from falcon_lab.model.attention.backend import widened
from falcon_lab.model.masks import PaddedTrees, batch_step_mask, batch_tree_mask
from falcon_lab.tree import TokenTree
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import Path


def tree_of(paths: list[Path], first: int = 0) -> TokenTree:
    layout = build_layout(paths, 1)
    tokens = torch.arange(first, first + len(layout.depth))
    nothing = torch.zeros(len(tokens))
    return TokenTree(
        tokens, layout.parents, layout.depth, layout.ancestors, "deterministic", nothing
    )


@given(st.lists(st.tuples(prefix_closed(6), st.integers(1, 9)), min_size=1, max_size=4))
def test_a_node_sees_its_rows_context_and_its_path(rows: list[tuple[list[Path], int]]) -> None:
    trees, starts = [tree_of(paths) for paths, _ in rows], [start for _, start in rows]
    padded = PaddedTrees.of(trees)
    seen = max(starts) + padded.width
    mask = widened(batch_tree_mask(padded.ancestors, starts), seen)
    assert mask.shape == (len(rows), padded.width, seen)
    assert bool(mask.any(-1).all())
    for row, (tree, start) in enumerate(zip(trees, starts, strict=True)):
        for node, column in product(range(tree.nodes), range(seen)):
            other = column - start
            on_path = 0 <= other < tree.nodes and bool(tree.ancestors[node, other])
            assert bool(mask[row, node, column]) == (column < start or on_path)


@given(st.lists(prefix_closed(6), min_size=1, max_size=4))
def test_padding_is_left_out_again(shapes: list[list[Path]]) -> None:
    trees = [tree_of(paths, 10 * number) for number, paths in enumerate(shapes)]
    padded = PaddedTrees.of(trees)
    assert padded.counts == [tree.nodes for tree in trees]
    assert torch.equal(padded.real(padded.tokens), torch.cat([tree.tokens for tree in trees]))
    assert torch.equal(padded.real(padded.depth), torch.cat([tree.depth for tree in trees]))


@pytest.mark.parametrize("starts", [[3], [4, 4], [1, 5, 3]])
def test_a_step_sees_its_own_row_up_to_itself(starts: list[int]) -> None:
    mask = batch_step_mask(starts, torch.device("cpu"))
    if mask is None:
        assert len(set(starts)) == 1
        return
    whole = widened(mask, max(starts) + 1)
    assert whole[:, 0].sum(-1).tolist() == [start + 1 for start in starts]
    assert bool(whole[:, 0, :2].all())


def test_rows_of_one_length_need_no_wider_mask() -> None:
    ancestors = PaddedTrees.of([tree_of([(0,)]), tree_of([(0,), (1,)])]).ancestors
    assert batch_tree_mask(ancestors, [7, 7]) is ancestors
