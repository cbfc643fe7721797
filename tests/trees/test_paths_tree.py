from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import CONTEXT, generate, plain
from fakes.drafters import RandomDrafter
from fakes.table_target import TableTarget
from falcon_lab.acceptance import Auto
from falcon_lab.controllers import Fixed
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, DraftOutput, Frontier, RoundContext
from falcon_lab.plugins.builtins import FixedConfig, PathsTreeConfig
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab.trees.paths import PathsTree

Paths = list[list[int]]
PATHS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6)


def tree_of(paths: Paths | None, nodes: int = 32, depth: int = 10, **budget: int) -> TokenTree:
    builder = PathsTree(PathsTreeConfig(nodes=nodes, depth=depth), CONTEXT)
    context = RoundContext(torch.tensor(9), Budget(**budget), Sampling(), torch.Generator())
    if builder.start(context) is not None:
        builder.grow(DraftOutput(torch.zeros(1, 0, 10), paths=paths))
    return builder.finish()


def routes_of(tree: TokenTree) -> set[tuple[int, ...]]:
    """The path of tokens to every node but the root."""
    found, parents, tokens = {}, tree.parents.tolist(), tree.tokens.tolist()
    for node in range(1, tree.nodes):
        found[node] = (*found.get(parents[node], ()), tokens[node])
    assert len(set(found.values())) == len(found)  # no two siblings are alike
    return set(found.values())


@given(PATHS)
def test_it_holds_every_path_once(paths: Paths) -> None:
    expected = {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}
    assert routes_of(tree_of(paths)) == expected


@given(PATHS, st.integers(0, 8), st.integers(0, 4))
def test_it_stays_within_its_size_and_the_budget(paths: Paths, nodes: int, depth: int) -> None:
    whole = routes_of(tree_of(paths))
    for tree in (tree_of(paths, nodes, depth), tree_of(paths, nodes=nodes, depth=depth)):
        assert tree.drafted <= nodes
        assert tree.max_depth <= depth
        assert routes_of(tree) <= whole
    fitting = {route for route in whole if len(route) <= depth}
    assert tree_of(paths, nodes, depth).drafted == min(nodes, len(fitting)) * (depth > 0)


def test_the_best_paths_come_first() -> None:
    assert routes_of(tree_of([[1, 2], [1, 3], [4]], nodes=3)) == {(1,), (1, 2), (1, 3)}


@given(PATHS)
def test_its_buffers_agree(paths: Paths) -> None:
    tree = tree_of(paths)
    assert tree.routes is not None
    assert torch.equal(tree.depth, tree.ancestors.sum(-1) - 1)
    for node in range(tree.nodes):
        route = list(dict.fromkeys(tree.routes[node].tolist()))
        assert route == tree.ancestors[node].nonzero().flatten().tolist()
    assert tree.max_depth == int(tree.depth.max())
    assert tree.proposal == "deterministic"


def test_a_drafter_that_never_has_paths_is_refused() -> None:
    with pytest.raises(FalconLabError, match="predicts tokens instead; choose chain"):
        tree_of(None)


class Guessing(RandomDrafter):
    """Proposes random paths."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        paths = torch.randint(self.vocab, (4, 3), generator=self.generator).tolist()
        return DraftOutput(torch.zeros(1, 0, self.vocab), paths=paths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_lossless(temperature: float) -> None:
    target: Any = TableTarget(5)
    tree = PathsTree(PathsTreeConfig(nodes=9, depth=3), CONTEXT)
    rule, controller = Auto(None, CONTEXT), Fixed(FixedConfig(), CONTEXT)
    engine = SpeculativeEngine(target, Guessing(5, 3), tree, rule, controller)
    ours = generate(engine, [1, 2], 80, temperature=temperature)
    assert ours.tokens == plain(target, [1, 2], 80, temperature=temperature).tokens
    assert sum(round_.accepted for round_ in ours.rounds) > 10
