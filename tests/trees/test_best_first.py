from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.growing import ROOT, NodeDrafter, check_tree, spelt
from falcon_lab.interfaces import Budget, DraftOutput, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.trees.best_first import BestFirstTree

BLOCKS = st.integers(1, 4)


def tree_of(
    block: int = 1, *, nodes: int = 9, depth: int = 6, beam: int = 3, width: int = 4
) -> BestFirstTree:
    return BestFirstTree(block, nodes=nodes, depth=depth, beam=beam, width=width)


def context(budget: Budget | None = None) -> RoundContext:
    return RoundContext(torch.tensor(ROOT), budget or Budget(), Sampling(), torch.Generator())


@given(
    BLOCKS,
    st.integers(0, 14),
    st.integers(0, 7),
    st.tuples(st.none() | st.integers(0, 7), st.none() | st.integers(0, 9), st.integers(0, 4)),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_every_tree_is_whole_and_within_every_limit(
    block: int,
    nodes: int,
    depth: int,
    budget: tuple[int | None, int | None, int],
    vocab: int,
    silent: float,
    seed: int,
) -> None:
    builder = tree_of(block, nodes=nodes, depth=depth)
    drafter = NodeDrafter(vocab, block, seed=seed, silent=silent)
    tree = drafter.grow(builder, Budget(*budget))
    check_tree(tree)
    assert tree.nodes <= builder.max_nodes
    assert tree.max_depth <= builder.max_depth
    assert tree.max_depth <= budget[2] * block
    assert len(drafter.asked) <= budget[2]
    assert budget[0] is None or tree.max_depth <= budget[0]
    assert budget[1] is None or tree.drafted <= budget[1]
    assert all(len(stands) <= builder.beam for stands in drafter.asked)
    if silent == 0 and nodes and depth and 0 not in budget:
        assert tree.drafted > 0


@pytest.mark.parametrize("budget", [Budget(depth=0), Budget(nodes=0), Budget(passes=0)])
def test_a_budget_of_nothing_asks_for_no_pass(budget: Budget) -> None:
    drafter, builder = NodeDrafter(5, 2), tree_of(2)
    assert spelt(drafter.grow(builder, budget)) == []
    assert drafter.asked == []
    assert drafter.grow(builder).drafted == 9, "the budget of the round before is forgotten"


def test_a_node_takes_its_candidates_from_its_own_row_of_its_own_block() -> None:
    for block in (1, 2, 3, 4):
        drafter = NodeDrafter(5, block, seed=block)
        tree = drafter.grow(tree_of(block, nodes=40))
        for path, log_q in zip(spelt(tree), tree.log_q.tolist()[1:], strict=True):
            level = len(path) - 1
            rows = drafter.logits(path[: level // block * block]).log_softmax(-1)
            assert log_q == pytest.approx(float(rows[level % block, path[-1]]), abs=1e-5)


@given(BLOCKS, st.integers(0, 3), st.integers(0, 99))
def test_a_round_that_is_broken_off_is_a_round_of_fewer_passes(
    block: int, passes: int, seed: int
) -> None:
    drafter = NodeDrafter(5, block, seed=seed)
    broken = drafter.grow(tree_of(block), passes=passes)
    whole = drafter.grow(tree_of(block), Budget(passes=passes))
    assert spelt(broken) == spelt(whole)


@given(BLOCKS, st.data())
def test_rows_that_are_not_there_end_the_tree(block: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, block - 1))
    drafter = NodeDrafter(5, block, rows=rows)
    tree = drafter.grow(tree_of(block))
    check_tree(tree)
    assert len(drafter.asked) == 1
    assert tree.max_depth == rows


def test_a_vocabulary_smaller_than_the_width_gives_as_many_children_as_it_can() -> None:
    tree = NodeDrafter(2, 1).grow(tree_of(nodes=30, depth=3, beam=9, width=9))
    assert [len(path) for path in spelt(tree)] == [1] * 2 + [2] * 4 + [3] * 8


def test_a_drafter_with_one_candidate_a_row_makes_a_chain() -> None:
    one = torch.full((1, 2, 9), -torch.inf)
    one[:, 0, 4] = one[:, 1, 5] = 0.0
    builder = tree_of(2, nodes=9, depth=6, beam=3, width=4)
    frontier, blocks = builder.start(context()), []
    while frontier is not None:
        blocks.append(len(frontier.parents))
        frontier = builder.grow(DraftOutput(one))
    tree = builder.finish()
    assert blocks == [1, 1, 1]
    assert tree.tokens.tolist() == [ROOT, 4, 5, 4, 5, 4, 5]
    assert tree.log_q.tolist() == [0.0] * 7
    check_tree(tree)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_rows_without_any_number_are_the_root_alone(value: float) -> None:
    builder = tree_of(2)
    builder.start(context())
    assert builder.grow(DraftOutput(torch.full((1, 2, 5), value))) is None
    assert builder.finish().tokens.tolist() == [ROOT]


def test_equal_scores_go_to_the_shallower_node_and_then_to_the_lower_rank() -> None:
    sure = torch.full((1, 3, 4), -torch.inf)
    sure[0, :, 0] = 0.0  # the same score for a node, its child and its grandchild
    builder = tree_of(3, nodes=2)
    builder.start(context())
    assert builder.grow(DraftOutput(sure)) is None, "nothing below could be among the best two"
    assert spelt(builder.finish()) == [(0,), (0, 0)]
    even = torch.zeros(1, 2, 2)
    builder = tree_of(2, nodes=5, depth=2)
    builder.start(context())
    builder.grow(DraftOutput(even))
    tree = builder.finish()
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    check_tree(tree)


def test_a_node_that_cannot_have_one_of_the_best_below_it_is_not_expanded() -> None:
    builder = tree_of(1, nodes=3, beam=3)
    builder.start(context())
    frontier = builder.grow(DraftOutput(torch.tensor([[[0.70, 0.15, 0.10, 0.05]]]).log()))
    assert frontier is not None
    assert frontier.tokens.tolist() == [[0], [1]], "the third best has no room below it"


def test_half_precision_logits_give_scores_in_full_precision() -> None:
    builder = tree_of(2, nodes=20)
    builder.start(context())
    builder.grow(DraftOutput(torch.randn(1, 2, 30, dtype=torch.bfloat16)))
    tree = builder.finish()
    assert tree.log_q.dtype == torch.float32
    check_tree(tree)
