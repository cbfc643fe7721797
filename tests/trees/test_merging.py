from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import CONTEXT
from falcon_lab.acceptance import SamplingRule
from falcon_lab.sampling import Sampling
from falcon_lab.testing.reference import chi_square
from falcon_lab.tree import TokenTree, listed_tree
from falcon_lab.trees.merging import Claim, MergedNode, cut, joined, merged_tree

Paths = list[list[int]]
PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=5)
ROOT = torch.tensor(9)


def tree_of(paths: Paths) -> TokenTree:
    """Chosen nodes, the first of which is the likeliest."""
    number: dict[tuple[int, ...], int] = {(): 0}
    for path in paths:
        for end in range(1, len(path) + 1):
            number.setdefault(tuple(path[:end]), len(number))
    nodes = [*number][1:]
    parents = [number[node[:-1]] for node in nodes]
    log_q = [-0.1 * (1 + number[node]) for node in nodes]
    return listed_tree(ROOT, [node[-1] for node in nodes], parents, log_q)


def spelt(tree: TokenTree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def claimed(claims: list[Claim], depth: int) -> float:
    return math.exp(max(claim.log_q for claim in claims))


@given(st.lists(PATHS, min_size=2, max_size=3))
def test_trees_are_joined_where_they_begin_alike(parts: list[Paths]) -> None:
    trees = [tree_of(paths) for paths in parts]
    nodes = joined(trees, claimed)
    merged = merged_tree(ROOT, nodes, cut(nodes, 99), trees)
    found = spelt(merged)
    assert len(set(found)) == len(found)
    assert set(found) == {path for tree in trees for path in spelt(tree)}
    assert torch.equal(merged.depth, merged.ancestors.sum(-1) - 1)


@given(st.lists(PATHS, min_size=2, max_size=3), st.integers(0, 9))
def test_a_cut_keeps_the_likeliest_nodes_and_what_is_above_them(
    parts: list[Paths], most: int
) -> None:
    trees = [tree_of(paths) for paths in parts]
    nodes = joined(trees, claimed)
    order = cut(nodes, most)
    assert len(order) == min(most + 1, len(nodes))
    assert all(nodes[number].parent in order for number in order[1:])
    left = [node.reach for number, node in enumerate(nodes) if number not in order]
    assert min(nodes[number].reach for number in order) >= max(left, default=0.0)


def drawn(paths: Paths, q: list[float]) -> TokenTree:
    """The same tree, all of its nodes drawn from one q."""
    tree = tree_of(paths)
    rows = torch.tensor([-1] + [0] * tree.drafted)
    return TokenTree(
        tree.tokens,
        tree.parents,
        tree.depth,
        tree.ancestors,
        "sampled",
        torch.tensor([0.0, *(math.log(q[token]) for token in tree.tokens.tolist()[1:])]),
        torch.tensor([q]),
        rows,
    )


def test_drawn_siblings_come_first_and_a_second_q_excludes_what_the_first_has_drawn() -> None:
    first, second = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    trees = [tree_of([[3], [0], [2]]), drawn([[1], [0]], first), drawn([[0], [3]], second)]
    nodes = joined(trees, claimed)
    merged = merged_tree(ROOT, nodes, cut(nodes, 9), trees)
    assert merged.proposal == "mixed"
    assert merged.tokens.tolist() == [9, 1, 0, 3, 2]
    assert merged.q is not None
    assert merged.q_row is not None
    assert merged.q_row.tolist() == [-1, 0, 0, 1, -1]
    torch.testing.assert_close(merged.q[0], torch.tensor(first))
    torch.testing.assert_close(merged.q[1], torch.tensor([0.0, 0.0, 3 / 7, 4 / 7]))
    torch.testing.assert_close(merged.log_q[3], torch.tensor(4 / 7).log())


def test_what_was_drawn_stays_whatever_its_chance() -> None:
    trees = [tree_of([[3], [2]]), drawn([[1, 1]], [0.01, 0.01, 0.49, 0.49])]
    nodes = joined(trees, claimed)
    assert spelt(merged_tree(ROOT, nodes, cut(nodes, 3), trees)) == [(1,), (3,), (1, 1)]


P = torch.tensor([0.05, 0.75, 0.1, 0.1])
FIRST, SECOND = [0.91, 0.03, 0.03, 0.03], [0.8, 0.02, 0.16, 0.02]
"""What two parts draw from, badly."""

Cut = Callable[[Sequence[MergedNode], int], list[int]]
SAMPLES = 1500


def fit(change: Callable[[TokenTree], TokenTree] | None = None, shorten: Cut = cut) -> float:
    """The fit of the token after the root, two candidates being drawn and one chosen."""
    generator = torch.Generator().manual_seed(2)
    rule, found = SamplingRule(None, CONTEXT), []
    for _ in range(SAMPLES):
        draws = torch.multinomial(torch.tensor([FIRST, SECOND]), 1, generator=generator)
        first, second = draws.flatten().tolist()
        trees = [tree_of([[3]]), drawn([[first]], FIRST), drawn([[second]], SECOND)]
        nodes = joined(trees, claimed)
        tree = merged_tree(ROOT, nodes, shorten(nodes, 9), trees)
        tree = change(tree) if change else tree
        logits = P.log().expand(tree.nodes, 4)
        accepted = rule(tree, logits, Sampling(1.0), generator)
        found.append([*tree.tokens[accepted.path[1:]].tolist(), int(accepted.next_token)][:1])
    return chi_square(torch.tensor(found), P)


def forgetful(tree: TokenTree) -> TokenTree:
    """A second q has what the first one has drawn still in it."""
    assert tree.q is not None
    rows = [row if bool(row.all()) else torch.tensor(SECOND) for row in tree.q]
    return replace(tree, q=torch.stack(rows))


def choosy(nodes: Sequence[MergedNode], most: int) -> list[int]:
    """Drawn nodes are kept for their value."""
    return [at for at in cut(nodes, most) if not at or nodes[at].draw is None or nodes[at].token]


def test_candidates_drawn_twice_and_chosen_leave_the_targets_distribution_as_it_is() -> None:
    assert fit() > 0.01


def test_a_second_q_that_forgets_what_the_first_has_drawn_does_not() -> None:
    assert fit(forgetful) < 1e-6


def test_drawn_nodes_that_are_kept_for_their_value_do_not() -> None:
    assert fit(shorten=choosy) < 1e-6
