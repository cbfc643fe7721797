from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fakes.drafters import RandomDrafter
from fakes.statistics import chi_square
from fakes.trees import prefix_closed
from fakes.waits import watched
from falcon_lab.interfaces import Budget, DraftOutput, Frontier, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.tree import Proposal, TokenTree, ancestor_matrix
from falcon_lab.trees.paths import Path, checked
from falcon_lab.trees.template_tree import TemplateTree, draw_without_replacement
from falcon_lab.trees.templates import cut, named

BLOCKS = st.integers(1, 4)
ROOT = 7


def context(budget: Budget | None = None, *, seed: int = 0, **sampling: Any) -> RoundContext:
    generator = torch.Generator().manual_seed(seed)
    return RoundContext(torch.tensor(ROOT), budget or Budget(), Sampling(**sampling), generator)


class Labels:
    """A drafter whose candidate of every (block, row, rank) is a token of its own.

    ``hidden`` are labels that it does not propose, ``rows`` how much of a block it speaks about.
    """

    def __init__(self, paths: list[Path], block: int, *, rows: int | None = None) -> None:
        self.block = block
        self.rows = block if rows is None else rows
        self.width = 1 + max((path[-1] for path in paths), default=0)
        self.stands = [()] + [path for path in checked(paths) if len(path) % block == 0]
        self.vocab = len(self.stands) * block * self.width + ROOT + 1
        self.hidden: set[int] = set()

    def label(self, path: Path) -> int:
        """What the rule says: row (L - 1) mod k of the block at depth floor((L - 1) / k) * k."""
        level = len(path) - 1
        stand = self.stands.index(path[: level // self.block * self.block])
        place = (stand * self.block + level % self.block) * self.width
        return ROOT + 1 + place + path[-1]

    def grow(
        self, builder: TemplateTree, round_context: RoundContext, passes: int = 99
    ) -> TokenTree:
        """A round: answers every block by what stands at it, which it reads off the frontier."""
        frontier, asked = builder.start(round_context), [()]
        for _ in range(passes):
            if frontier is None:
                break
            rows = torch.stack([self.logits(stand) for stand in asked])
            frontier = builder.grow(DraftOutput(rows))
            if frontier is not None:
                asked = [self.below(asked, *block) for block in self.blocks(frontier)]
        return builder.finish()

    def logits(self, stand: Path) -> Tensor:
        logits = torch.full((self.rows, self.vocab), -torch.inf)
        for row in range(self.rows):
            for rank in range(self.width):
                token = self.label((*stand, *(0,) * row, rank))
                logits[row, token] = -torch.inf if token in self.hidden else -float(rank)
        return logits

    def blocks(self, frontier: Frontier) -> list[tuple[list[int], int]]:
        return list(zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True))

    def below(self, asked: list[Path], tokens: list[int], parent: int) -> Path:
        """The stand that these k tokens lead to from the block they grew out of."""
        path = asked[parent]
        for token in tokens:
            path = (*path, (token - ROOT - 1) % self.width)
        assert tokens == [
            self.label(path[:depth]) for depth in range(len(asked[parent]) + 1, len(path) + 1)
        ]
        return path


def check(tree: TokenTree, paths: tuple[Path, ...], labels: Labels) -> None:
    """The tree is these paths, every token from its own row."""
    nodes = [(), *paths]
    assert tree.tokens.tolist() == [ROOT, *map(labels.label, paths)]
    assert tree.parents.tolist() == [-1, *(nodes.index(path[:-1]) for path in paths)]
    assert tree.depth.tolist() == [len(path) for path in nodes]
    assert torch.equal(tree.ancestors, ancestor_matrix(tree.parents))
    assert tree.max_depth == int(tree.depth.max())
    assert tree.log_q.shape == tree.tokens.shape
    assert bool((tree.log_q <= 0).all())


@given(prefix_closed(), BLOCKS)
def test_every_token_comes_from_its_own_row(paths: list[Path], block: int) -> None:
    labels = Labels(paths, block)
    builder = TemplateTree(checked(paths), block, "deterministic")
    check(labels.grow(builder, context()), checked(paths), labels)


@pytest.mark.parametrize("name", ["vicuna", "llama", "k3", "k4", "auto"])
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_so_it_does_in_the_shipped_trees(name: str, block: int) -> None:
    paths = named(name, block)
    labels = Labels(list(paths), block)
    builder = TemplateTree(paths, block, "deterministic")
    check(labels.grow(builder, context()), paths, labels)
    assert builder.max_nodes == len(paths) + 1
    assert builder.max_depth == max(map(len, paths))


@given(
    prefix_closed(),
    BLOCKS,
    st.none() | st.integers(0, 8),
    st.none() | st.integers(0, 12),
    st.none() | st.integers(0, 3),
)
def test_a_budget_cuts_the_tree_and_keeps_it_whole(
    paths: list[Path], block: int, depth: int | None, nodes: int | None, passes: int | None
) -> None:
    labels = Labels(paths, block)
    builder = TemplateTree(checked(paths), block, "deterministic")
    tree = labels.grow(builder, context(Budget(depth, nodes, passes)))
    deepest = min(99 if depth is None else depth, 99 if passes is None else passes * block)
    check(tree, cut(checked(paths), block, deepest, nodes), labels)


def test_a_builder_forgets_the_budget_of_the_round_before() -> None:
    paths = named("k2-8", 2)
    labels = Labels(list(paths), 2)
    builder = TemplateTree(paths, 2, "deterministic")
    for budget in (Budget(), Budget(depth=1), Budget(), Budget(depth=0), Budget(nodes=3), Budget()):
        check(
            labels.grow(builder, context(budget)), cut(paths, 2, budget.depth, budget.nodes), labels
        )


@given(prefix_closed(), BLOCKS, st.integers(0, 4))
def test_a_round_that_is_broken_off_keeps_what_its_passes_decided(
    paths: list[Path], block: int, passes: int
) -> None:
    labels = Labels(paths, block)
    builder = TemplateTree(checked(paths), block, "deterministic")
    tree = labels.grow(builder, context(), passes)
    check(tree, cut(checked(paths), block, passes * block), labels)


@given(prefix_closed(), BLOCKS, st.data())
def test_what_is_not_proposed_is_dropped_with_its_subtree(
    paths: list[Path], block: int, data: Any
) -> None:
    labels = Labels(paths, block)
    for path in data.draw(st.lists(st.sampled_from(paths)) if paths else st.just([])):
        # The worst of a row, from here on: hiding one alone would let the others move up.
        worse = range(path[-1], labels.width)
        labels.hidden.update(labels.label((*path[:-1], rank)) for rank in worse)
    survivors = [
        path
        for path in checked(paths)
        if not any(labels.label(path[:depth]) in labels.hidden for depth in range(1, len(path) + 1))
    ]
    tree = labels.grow(TemplateTree(checked(paths), block, "deterministic"), context())
    check(tree, tuple(survivors), labels)


def test_a_dropped_block_is_not_asked_and_parents_count_those_that_were() -> None:
    paths = checked(["0", "1", "2", "00", "10", "20", "100", "200", "201"])
    builder = TemplateTree(paths, 1, "deterministic")
    builder.start(context())
    first = torch.tensor([[[0.0, 3.0, 2.0, 1.0]]])
    frontier = builder.grow(DraftOutput(first))
    assert frontier is not None
    assert frontier.tokens.tolist() == [[1], [2], [3]]
    second = torch.full((3, 1, 4), 0.0)
    second[1] = -torch.inf  # below the second child nothing is proposed
    frontier = builder.grow(DraftOutput(second))
    assert frontier is not None
    assert frontier.parents.tolist() == [2]
    assert builder.grow(DraftOutput(torch.tensor([[[0.0, 5.0, 4.0, 1.0]]]))) is None
    tree = builder.finish()
    assert tree.depth.tolist() == [0, 1, 1, 1, 2, 2, 3, 3]
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 3, 5, 5]
    assert tree.tokens[-2:].tolist() == [1, 2]
    assert torch.equal(tree.ancestors, ancestor_matrix(tree.parents))


@given(prefix_closed(), BLOCKS, st.data())
def test_rows_that_are_not_there_end_the_tree(paths: list[Path], block: int, data: Any) -> None:
    rows = data.draw(st.integers(0, block - 1))
    labels = Labels(paths, block, rows=rows)
    tree = labels.grow(TemplateTree(checked(paths), block, "deterministic"), context())
    check(tree, cut(checked(paths), block, rows), labels)


@given(prefix_closed(), BLOCKS)
def test_a_promise_that_all_is_proposed_spares_the_look(paths: list[Path], block: int) -> None:
    torch.manual_seed(0)
    answers = torch.randn(len(paths) + 1, block, 60)

    def grown(promise: bool) -> tuple[TokenTree, list[str]]:
        builder = TemplateTree(checked(paths), block, "deterministic")
        with watched() as waits:
            frontier = builder.start(context())
            waits.clear()  # the layout is made from the host's values, once
            while frontier is not None:
                some = answers[: frontier.parents.shape[0]]
                frontier = builder.grow(DraftOutput(some, all_proposed=promise))
            return builder.finish(), list(waits)

    (tree, looks), (same, none) = grown(promise=False), grown(promise=True)
    assert none == []
    assert bool(paths) == bool(looks)
    assert torch.equal(tree.tokens, same.tokens)
    assert same.routes is not None
    assert same.max_depth == int(same.depth.max())


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 50), (2, 1)])
def test_a_promise_is_about_the_rows_and_tokens_that_are_there(rows: int, vocabulary: int) -> None:
    builder = TemplateTree(checked(["0", "1", "00", "000"]), 2, "deterministic")
    builder.start(context())
    builder.grow(DraftOutput(torch.randn(1, rows, vocabulary), all_proposed=True))
    tree = builder.finish()
    assert tree.drafted == 2
    assert tree.routes is None
    assert tree.max_depth == rows


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_no_rows_at_all_are_the_root_alone(proposal: Proposal) -> None:
    builder = TemplateTree(named("vicuna", 2), 2, proposal)
    builder.start(context(temperature=1.0))
    assert builder.grow(DraftOutput(torch.zeros(1, 0, 50))) is None
    assert builder.finish().nodes == 1


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_a_vocabulary_smaller_than_a_family_gives_as_many_children_as_it_can(
    proposal: Proposal,
) -> None:
    builder = TemplateTree(named("vicuna", 2), 2, proposal)
    drafter = RandomDrafter(3, 2)
    frontier = builder.start(context(temperature=1.0))
    while frontier is not None:
        frontier = builder.grow(drafter.draft(frontier))
    tree = builder.finish()
    assert sorted(tree.tokens[1:4].tolist()) == [0, 1, 2]
    assert int((tree.parents == 0).sum()) == 3


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_a_row_without_any_proposal_has_no_children_and_no_nan(proposal: Proposal) -> None:
    builder = TemplateTree(checked(["0", "1", "00"]), 2, proposal)
    builder.start(context(temperature=1.0))
    builder.grow(DraftOutput(torch.full((1, 2, 5), -torch.inf)))
    assert builder.finish().nodes == 1


def sampled_tree(seed: int = 0, block: int = 2, **sampling: Any) -> TokenTree:
    builder = TemplateTree(named("k2-24", block), block, "sampled")
    drafter = RandomDrafter(9, block, seed=seed)
    frontier = builder.start(context(seed=seed, **sampling))
    while frontier is not None:
        frontier = builder.grow(drafter.draft(frontier))
    return builder.finish()


@pytest.mark.parametrize("block", [1, 2, 3])
def test_sampled_siblings_differ_and_carry_the_distribution_they_came_from(block: int) -> None:
    tree = sampled_tree(block=block, temperature=0.8)
    assert tree.proposal == "sampled"
    assert tree.q is not None
    assert tree.q_row is not None
    assert tree.q_row[0] == -1
    torch.testing.assert_close(tree.q.sum(-1), torch.ones(tree.q.shape[0]))
    torch.testing.assert_close(tree.q[tree.q_row[1:], tree.tokens[1:]].log(), tree.log_q[1:])
    for parent in range(tree.nodes):
        children = tree.parents == parent
        assert tree.tokens[children].unique().numel() == int(children.sum())
        assert tree.q_row[children].unique().numel() <= 1


def test_sampled_rows_of_dropped_blocks_do_not_shift_the_others() -> None:
    for seed in range(20):
        tree = sampled_tree(seed, temperature=0.7, top_k=2)
        assert tree.q is not None
        assert tree.q_row is not None
        assert bool((tree.q[tree.q_row[1:], tree.tokens[1:]] > 0).all())
        torch.testing.assert_close(tree.q[tree.q_row[1:], tree.tokens[1:]].log(), tree.log_q[1:])


def test_filters_apply_to_what_is_sampled() -> None:
    tree = sampled_tree(temperature=1.0, top_k=2)
    assert tree.q is not None
    assert int((tree.q > 0).sum(-1).max()) == 2
    assert int((tree.parents == 0).sum()) == 2  # the template asks for more


def test_a_seed_gives_one_sampled_tree() -> None:
    first, again, other = (sampled_tree(seed, temperature=1.0) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_deterministic_trees_and_greedy_decoding_draw_nothing(temperature: float) -> None:
    proposal: Proposal = "sampled" if temperature == 0 else "deterministic"
    builder = TemplateTree(named("k2-8", 2), 2, proposal)
    round_context = context(temperature=temperature)
    before = round_context.generator.get_state()
    frontier = builder.start(round_context)
    while frontier is not None:
        frontier = builder.grow(RandomDrafter(9, 2).draft(frontier))
    tree = builder.finish()
    assert (tree.proposal, tree.q, tree.q_row) == ("deterministic", None, None)
    assert torch.equal(round_context.generator.get_state(), before)


def test_children_are_the_most_likely_tokens_in_order() -> None:
    builder = TemplateTree(checked(["0", "1", "2"]), 1, "deterministic")
    builder.start(context())
    logits = torch.tensor([[[0.5, 2.0, -1.0, 3.0, 1.0]]])
    builder.grow(DraftOutput(logits))
    tree = builder.finish()
    assert tree.tokens.tolist() == [ROOT, 3, 1, 4]
    torch.testing.assert_close(tree.log_q[1:], logits[0, 0].log_softmax(-1)[[3, 1, 4]])


def test_drawing_without_replacement_follows_its_definition() -> None:
    q = torch.tensor([0.5, 0.3, 0.15, 0.05])
    samples = 20_000
    generator = torch.Generator().manual_seed(11)
    rows = q.log().expand(1, samples, 4)
    tokens, _, _ = draw_without_replacement(rows, 3, Sampling(temperature=1.0), generator)
    exact = torch.zeros(4, 4, 4)
    for first in range(4):
        for second in set(range(4)) - {first}:
            for third in set(range(4)) - {first, second}:
                left = 1 - q[first]
                exact[first, second, third] = (
                    q[first] * q[second] / left * q[third] / (left - q[second])
                )
    assert chi_square(tokens[0], exact.double()) > 0.01
