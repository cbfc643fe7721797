from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.growing import NodeDrafter, Tokens, best, check_tree, spelt
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundContext, TreeBuilder
from falcon_lab.plugins.builtins import DynamicTreeConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.best_first import DynamicTree

HOST: Any = None


def built(block: int = 1, **options: Any) -> DynamicTree:
    return DynamicTree(DynamicTreeConfig(**options), BuildContext(HOST, block))


def eagle2(drafter: NodeDrafter, config: DynamicTreeConfig) -> set[Tokens]:
    """EAGLE-2 as it is written: expand all of the beam, remember everything, rerank at the end."""
    assert config.depth is not None
    block = drafter.block
    everything: dict[Tokens, float] = {}
    beam: dict[Tokens, float] = {(): 0.0}
    for start in range(0, config.depth, block):
        below = {
            path: beam[at] + score
            for at in beam
            for path, score in drafter.grid(at, config.depth - start, config.width).items()
        }
        everything |= below
        deepest = {path: at for path, at in below.items() if len(path) == start + block}
        beam = {path: deepest[path] for path in best(deepest, config.beam)}
    return best(everything, config.nodes)


@given(
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 10**6),
)
def test_it_is_eagle_2_for_every_block_size(
    block: int, nodes: int, beam: int, width: int, depth: int, silent: float, seed: int
) -> None:
    config = DynamicTreeConfig(nodes=nodes, beam=beam, width=width, depth=depth)
    drafter = NodeDrafter(5, block, seed=seed, silent=silent)
    tree = drafter.grow(DynamicTree(config, BuildContext(HOST, block)))
    check_tree(tree)
    assert set(spelt(tree)) == eagle2(drafter, config)


def test_a_worked_example_with_two_tokens_a_pass() -> None:
    builder = built(2, nodes=5, beam=1, width=2, depth=3)
    builder.start(RoundContext(torch.tensor(9), Budget(), Sampling(), torch.Generator()))
    first = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.7, 0.1]]]).log()
    # Level one: 0 (.6), 1 (.3). Level two: 01 (.42), 11 (.21), 00 (.12), 10 (.06).
    frontier = builder.grow(DraftOutput(first))
    assert frontier is not None
    assert frontier.tokens.tolist() == [[0, 1]]
    assert frontier.parents.tolist() == [0]
    # Below 01: 012 (.378), 011 (.0294).
    second = torch.tensor([[[0.03, 0.07, 0.9], [0.4, 0.3, 0.3]]]).log()
    assert builder.grow(DraftOutput(second)) is None
    tree = builder.finish()
    assert spelt(tree) == [(0,), (1,), (0, 1), (1, 1), (0, 1, 2)]
    assert tree.log_q.exp().tolist() == pytest.approx([1.0, 0.6, 0.3, 0.7, 0.7, 0.9])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_temperature_changes_nothing_and_nothing_is_drawn(temperature: float) -> None:
    drafter = NodeDrafter(9, 2)
    tree = drafter.grow(built(2), temperature=temperature)
    assert spelt(tree) == spelt(drafter.grow(built(2)))
    assert (tree.proposal, tree.q, tree.q_row) == ("deterministic", None, None)


@pytest.mark.parametrize(("block", "depth"), [(1, 4), (2, 6), (3, 6), (4, 8)])
def test_the_depth_goes_by_the_block_unless_it_is_given(block: int, depth: int) -> None:
    tree: TreeBuilder = built(block)
    assert (tree.max_depth, tree.max_nodes) == (depth, 17)
    assert built(block, depth=0).max_depth == 0


def test_a_wide_beam_expands_no_more_than_the_best_of_a_level() -> None:
    drafter = NodeDrafter(9, 1, seed=5)
    drafter.grow(built(1, nodes=60, beam=10, width=10, depth=7))
    assert len(drafter.asked) == 7
    assert [len(stands) for stands in drafter.asked[:2]] == [1, 9]
    assert max(map(len, drafter.asked)) <= 10
