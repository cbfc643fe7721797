"""Shapes: S samples, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everything import everything
from fakes.growing import ROOT, NodeDrafter, spelt
from fakes.uniting import Source, builder_of, context_of, grow
from falcon_lab.acceptance import SamplingRule
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, BuildContext, Frontier, RoundContext, RoundOutcome
from falcon_lab.sampling import Sampling
from falcon_lab.testing.reference import TokenTable, chi_square
from falcon_lab.testing.tested import ComponentUnderTest
from falcon_lab.testing.tree_builders import check_tree
from falcon_lab.tree import TokenTree
from falcon_lab.trees import union
from falcon_lab.trees.template_tree import TemplateTree

V = 12
DYNAMIC = {"name": "dynamic", "nodes": 8, "beam": 2, "width": 3, "depth": 3}
DRAWN = {"name": "static", "template": {"": 2, "0": 2, "1": 1}, "proposal": "sampled"}
DRAWN_CHAIN = {"name": "chain", "depth": 2, "proposal": "sampled"}
PATHS = {"name": "paths", "nodes": 9}
FOUND = [[0, 1, 2], [0, 3], [5, 5, 5, 5]]

TESTED = ComponentUnderTest("tree_builder", DYNAMIC)


def alone(tree: dict[str, Any], source: Source, sampling: Sampling) -> TokenTree:
    """The tree of a part without the others; nothing is drawn for it."""
    known = everything()
    block = source.block if isinstance(source, NodeDrafter) else 9
    host: Any = None
    made = known.build("tree_builder", tree, BuildContext(host, block))

    class Only(union.UnionTree):
        def __init__(self) -> None:
            self.builders, self.max_nodes, self.proposal = (made,), 99, "deterministic"
            self.reset()

    return grow(Only(), [source], context_of(sampling))


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 50),
    block=st.integers(1, 3),
    nodes=st.integers(0, 14),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_its_nodes_are_those_of_its_parts(
    seed: int, block: int, nodes: int, temperature: float
) -> None:
    sampling = Sampling(temperature)
    trees = [DYNAMIC, PATHS, {"name": "chain", "depth": 3, "proposal": "deterministic"}]
    sources: list[Source] = [
        NodeDrafter(V, block, seed=seed, silent=0.2),
        FOUND,
        NodeDrafter(V, 1, seed=seed + 1),
    ]
    parts = [alone(tree, source, sampling) for tree, source in zip(trees, sources, strict=True)]
    tree = grow(builder_of(trees, sources, nodes), sources, context_of(sampling))
    check_tree(TESTED, tree, V)
    whole = {path for part in parts for path in spelt(part)}
    assert set(spelt(tree)) <= whole
    assert tree.drafted == min(nodes, len(whole))
    assert tree.proposal == "deterministic"


def test_a_round_may_be_broken_off_and_limited() -> None:
    sources: list[Source] = [NodeDrafter(V, 1), FOUND]
    builder = builder_of([DYNAMIC, PATHS], sources)
    first = grow(builder, sources, context_of(), passes=1)
    assert {path for path in spelt(first) if len(path) > 1} == {(0, 1), (0, 3), (0, 1, 2)} | {
        (5,) * length for length in (2, 3, 4)
    }
    for limit in (Budget(depth=0), Budget(nodes=0), Budget(passes=0)):
        assert grow(builder, sources, context_of(budget=limit)).drafted == 0
    assert grow(builder, sources, context_of(budget=Budget(depth=2))).max_depth == 2
    assert grow(builder, sources, context_of(budget=Budget(nodes=3))).drafted == 3


def test_what_a_text_accepts_decides_what_is_kept_until_the_next_text() -> None:
    sources: list[Source] = [NodeDrafter(V, 1, seed=4), [[7, 8, 9, 10]]]
    builder = builder_of([DYNAMIC, PATHS], sources, nodes=5)
    before = spelt(grow(builder, sources, context_of()))
    for _ in range(12):
        tree = grow(builder, sources, context_of())
        there, text = spelt(tree), (7, 8, 9, 10)
        path = [0, *(1 + there.index(text[:n]) for n in range(1, 5) if text[:n] in there)]
        builder.update(RoundOutcome(tree.max_depth, tree.drafted, len(path) - 1, path))
    after = spelt(grow(builder, sources, context_of()))
    assert (7, 8, 9, 10) in after
    assert (7, 8, 9, 10) not in before
    builder.reset()
    assert spelt(grow(builder, sources, context_of())) == before


def test_a_drawn_part_keeps_to_its_share_whatever_is_left_for_the_others() -> None:
    sources: list[Source] = [FOUND, NodeDrafter(V, 2)]
    builder = builder_of([PATHS, DRAWN], sources, nodes=6)
    tree = grow(builder, sources, context_of(Sampling(1.0)))
    assert tree.drafted == 6
    assert tree.proposal == "mixed"
    assert tree.q_row is not None
    assert int((tree.q_row >= 0).sum()) == 3


def test_a_part_that_draws_more_than_its_share_is_refused() -> None:
    class Spending(TemplateTree):
        def start(self, context: RoundContext) -> Frontier | None:
            return super().start(replace(context, budget=Budget()))

    sources: list[Source] = [FOUND, NodeDrafter(V, 2)]
    builder = builder_of([PATHS, DYNAMIC], sources, nodes=3)
    builder.builders = builder.builders[0], Spending([(0,), (1,), (0, 0), (0, 1)], 2, "sampled")
    with pytest.raises(FalconLabError, match="must say so"):
        grow(builder, sources, context_of(Sampling(1.0)))


def test_a_tree_for_every_drafter_is_asked_for() -> None:
    host: Any = None
    node = {"name": "union", "parts": [DYNAMIC, PATHS]}
    with pytest.raises(FalconLabError, match="2 parts, and its drafter has none"):
        everything().build("tree_builder", node, BuildContext(host, 1))


# --- sampling -----------------------------------------------------------------------------------


class Remembered(NodeDrafter):
    """Computes the logits of a node once."""

    def logits(self, stand: tuple[int, ...]) -> Tensor:
        if (self.seed, stand) not in KNOWN:
            KNOWN[self.seed, stand] = super().logits(stand)
        return KNOWN[self.seed, stand]


KNOWN: dict[tuple[int, tuple[int, ...]], Tensor] = {}

MIXED: dict[str, tuple[list[dict[str, Any]], list[Source]]] = {
    "drawn and chosen": ([DRAWN, DYNAMIC], [Remembered(8, 1, seed=1), Remembered(8, 1, seed=2)]),
    "drawn twice and found": (
        [DRAWN_CHAIN, PATHS, DRAWN],
        [Remembered(8, 1, seed=6), [[0, 1], [5, 5]], Remembered(8, 3, seed=7)],
    ),
}
SAMPLES = 1500


def p_value(kind: str, samples: int = SAMPLES) -> float:
    """The fit of two sampled tokens to the target's own distribution; each round is followed up."""
    trees, sources = MIXED[kind]
    generator = torch.Generator().manual_seed(11)
    table, sampling = TokenTable(8, torch.Generator().manual_seed(3)), Sampling(1.0)
    builder = builder_of(trees, sources, nodes=7)
    rule = SamplingRule(None, context_of())  # type: ignore[arg-type]
    texts = []
    for _ in range(samples):
        tree = grow(builder, sources, context_of(sampling, generator))
        found = rule(tree, table.logits(tree), sampling, generator)
        path = found.path.tolist()
        builder.update(RoundOutcome(tree.max_depth, tree.drafted, len(path) - 1, path))
        texts.append(table.text(tree, found, sampling, generator))
    return chi_square(torch.tensor(texts), table.exact(ROOT, sampling))


@pytest.mark.parametrize("kind", MIXED)
def test_two_tokens_follow_the_targets_own_distribution(kind: str) -> None:
    assert p_value(kind) > 0.01


def swapped(tree: TokenTree) -> TokenTree:
    """Every node says that it was drawn from the next row."""
    assert tree.q is not None
    assert tree.q_row is not None
    rows = torch.where(tree.q_row < 0, -1, (tree.q_row + 1) % len(tree.q))
    return replace(tree, q_row=rows)


def all_drawn(tree: TokenTree) -> TokenTree:
    """Chosen nodes say that they were drawn from their siblings' row, or the first one."""
    assert tree.q_row is not None
    return replace(tree, proposal="sampled", q_row=tree.q_row.clamp(min=0))


@pytest.mark.parametrize("change", [swapped, all_drawn])
def test_the_same_test_finds_a_node_with_the_q_of_another(
    change: Callable[[TokenTree], TokenTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = union.merged_tree
    monkeypatch.setattr(union, "merged_tree", lambda *given: change(made(*given)))
    assert p_value("drawn twice and found", 500) < 1e-6
