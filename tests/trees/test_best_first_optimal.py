from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.growing import NodeDrafter, best, check_tree, spelt
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundContext, TreeBuilder
from falcon_lab.plugins.builtins import DynamicTreeConfig, OptimalTreeConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.best_first import DynamicTree, OptimalTree

HOST: Any = None


def built(block: int = 1, **options: Any) -> OptimalTree:
    return OptimalTree(OptimalTreeConfig(**options), BuildContext(HOST, block))


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 16),
    st.sampled_from([0.0, 0.4]),
    st.integers(0, 10**6),
)
def test_it_holds_the_likeliest_of_all_paths(
    block: int, passes: int, nodes: int, silent: float, seed: int
) -> None:
    vocab = {1: 5, 2: 3, 3: 2, 4: 2}[block]
    passes = min(passes, 6 // block)
    drafter = NodeDrafter(vocab, block, seed=seed, silent=silent)
    tree = drafter.grow(built(block, nodes=nodes, passes=passes))
    check_tree(tree)
    assert set(spelt(tree)) == best(drafter.reachable(passes * block), nodes)


@pytest.mark.parametrize(("block", "passes"), [(1, 3), (3, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_no_prefix_closed_tree_of_the_same_size_is_likelier(
    block: int, passes: int, seed: int
) -> None:
    """By trying every one: the sum of its nodes' probabilities is what a tree is worth."""
    drafter = NodeDrafter(2, block, seed=seed)
    scores = drafter.reachable(3)
    worth = max(
        sum(math.exp(scores[path]) for path in chosen)
        for chosen in combinations(scores, 5)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen)
    )
    tree = drafter.grow(built(block, nodes=5, passes=passes), Budget(depth=3))
    ours = sum(math.exp(scores[path]) for path in spelt(tree))
    assert ours == pytest.approx(worth)


def test_one_pass_over_a_grid_gives_the_known_answer() -> None:
    rows = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.45, 0.1, 0.45]]]).log()
    builder = built(3, nodes=6, passes=1)
    builder.start(RoundContext(torch.tensor(9), Budget(), Sampling(), torch.Generator()))
    assert builder.grow(DraftOutput(rows)) is None
    # .5, .3, .2; 01 .4, 11 .24; 010 and 012 .18 each, of which one has room.
    assert spelt(builder.finish()) == [(0,), (1,), (2,), (0, 1), (1, 1), (0, 1, 0)]


@given(st.integers(1, 4), st.integers(0, 10**6))
def test_no_beam_makes_a_likelier_tree(block: int, seed: int) -> None:
    drafter = NodeDrafter(5, block, seed=seed)
    dynamic = DynamicTree(DynamicTreeConfig(nodes=12), BuildContext(HOST, block))
    optimal = built(block, nodes=12)
    assert optimal.max_depth == dynamic.max_depth
    scores = [
        sum(math.exp(score) for score in path_scores(drafter.grow(tree)))
        for tree in (optimal, dynamic)
    ]
    assert scores[0] >= scores[1] - 1e-6


def path_scores(tree: Any) -> list[float]:
    return (tree.ancestors.float() @ tree.log_q).tolist()


def test_blocks_that_cannot_matter_are_not_asked() -> None:
    drafter = NodeDrafter(9, 1, seed=1)
    drafter.grow(built(1, nodes=16, passes=4))
    assert all(len(stands) < 16 for stands in drafter.asked)


@pytest.mark.parametrize(("block", "depth"), [(1, 4), (2, 6), (3, 6), (4, 8)])
def test_the_passes_go_by_the_block_unless_they_are_given(block: int, depth: int) -> None:
    tree: TreeBuilder = built(block)
    assert (tree.max_depth, tree.max_nodes) == (depth, 17)
    assert built(block, passes=1).max_depth == block
    assert built(block, passes=0).max_depth == 0
