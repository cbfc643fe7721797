"""Every promise of a tree builder, broken by one that breaks it alone, is found by the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from everything import everything
from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext
from falcon_lab.plugins.builtins import UnionTreeConfig
from falcon_lab.testing import ContractError, check_tree_builder
from falcon_lab.tree import TokenTree, ancestor_matrix
from falcon_lab.trees.template_tree import TemplateTree
from falcon_lab.trees.union import UnionTree

PATHS = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))


class Mine(TemplateTree):
    """Keeps all promises."""

    def __init__(self, context: BuildContext, proposal: Any = "deterministic") -> None:
        paths = [path for path in PATHS if len(path) <= context.reach(3)]
        super().__init__(paths, context.block, proposal)


def finishing(
    change: Callable[[TokenTree], TokenTree], proposal: str = "deterministic"
) -> Callable[[BuildContext], Any]:
    """A builder whose trees are given out otherwise."""

    class Finishing(Mine):
        def finish(self) -> TokenTree:
            tree = super().finish()
            return change(tree) if tree.nodes > 3 else tree

    return lambda context: Finishing(context, proposal)


def put(values: Tensor, place: int, value: Any) -> Tensor:
    changed = values.clone()
    changed[place] = value
    return changed


def renumbered(tree: TokenTree) -> TokenTree:
    """Children before their parents."""
    order = torch.cat((torch.zeros(1, dtype=torch.long), torch.arange(tree.nodes - 1, 0, -1)))
    parents = tree.parents[order]
    parents = torch.where(parents > 0, tree.nodes - parents, parents)
    return TokenTree(
        tree.tokens[order],
        parents,
        tree.depth[order],
        ancestor_matrix(parents),
        tree.proposal,
        tree.log_q[order],
    )


def without_budget(part: str) -> Callable[[BuildContext], Any]:
    class Spending(Mine):
        def start(self, context: RoundContext) -> Frontier | None:
            budget = replace(context.budget, **{part: None})
            return super().start(replace(context, budget=budget))

    return Spending


class TooDeep(Mine):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.max_depth = 1

    def start(self, context: RoundContext) -> Frontier | None:
        depth, self.max_depth = self.max_depth, max(len(path) for path in self.paths)
        frontier = super().start(context)
        self.max_depth = depth
        return frontier


class TooMany(Mine):
    """Says that it has fewer nodes than it builds."""

    def finish(self) -> TokenTree:
        tree = super().finish()
        self.max_nodes = min(self.max_nodes, 5)
        return tree


class Unreachable(TemplateTree):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(PATHS, context.block, "deterministic")


class Nameless(Mine):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.max_nodes = 0


class Everything(Mine):
    """Takes what is not proposed for a proposal."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        return super().grow(DraftOutput(output.logits.nan_to_num(neginf=-30.0)))


class Columns(Mine):
    """Takes columns of a draft vocabulary for the target's tokens."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        return super().grow(replace(output, vocabulary=None))


class Remembering(Mine):
    """Goes on with what the round before said."""

    before: Tensor | None = None

    def grow(self, output: DraftOutput) -> Frontier | None:
        logits = output.logits
        if self.before is not None and self.before.shape == logits.shape:
            logits, self.before = self.before, logits
        else:
            self.before = logits
        return super().grow(DraftOutput(logits))


class OtherRow(Mine):
    """Takes a node's candidates from the next row of the block."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        return super().grow(DraftOutput(output.logits.roll(1, 1)))


class WrongParents(Mine):
    def grow(self, output: DraftOutput) -> Frontier | None:
        frontier = super().grow(output)
        return None if frontier is None else replace(frontier, parents=frontier.parents + 1)


class WrongTokens(Mine):
    def grow(self, output: DraftOutput) -> Frontier | None:
        frontier = super().grow(output)
        return None if frontier is None else replace(frontier, tokens=frontier.tokens[:, :0])


class NotTheRoot(Mine):
    def start(self, context: RoundContext) -> Frontier | None:
        frontier = super().start(context)
        return None if frontier is None else replace(frontier, tokens=context.root.view(1, 1))


class Elsewhere(Mine):
    """Expands other tokens than those that stand in its tree."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        frontier = super().grow(output)
        return None if frontier is None else replace(frontier, tokens=(frontier.tokens + 1) % 12)


class Drawing(Mine):
    """Draws from torch's global generator."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        noise = torch.randn(output.logits.shape)
        return super().grow(DraftOutput(output.logits + noise))


class Pretending(Mine):
    """Chooses the best candidates and says that they were drawn."""

    def grow(self, output: DraftOutput) -> Frontier | None:
        self._proposal = "deterministic"
        self.said = [*getattr(self, "said", ()), output.target_logits.flatten(0, 1)]
        return super().grow(output)

    def start(self, context: RoundContext) -> Frontier | None:
        self.said = []
        return super().start(context)

    def finish(self) -> TokenTree:
        tree = super().finish()
        if self._context.sampling.greedy or not self.said:
            return tree
        q = torch.cat(self.said).softmax(-1)
        rows = []
        for node in range(tree.nodes):
            there = (q[:, tree.tokens[node]].log() - tree.log_q[node]).abs() < 1e-5
            rows.append(int(there.nonzero()[0, 0]) if node else -1)
        return replace(tree, proposal="sampled", q=q, q_row=torch.tensor(rows), routes=None)


BROKEN: dict[str, tuple[Callable[[BuildContext], Any], str]] = {
    "children before parents": (finishing(renumbered), "TokenTree.parents"),
    "a root with a parent": (
        finishing(lambda tree: replace(tree, parents=put(tree.parents, 0, 0))),
        "TokenTree.parents",
    ),
    "a depth from nowhere": (
        finishing(lambda tree: replace(tree, depth=put(tree.depth, -1, 1))),
        "TokenTree.depth",
    ),
    "ancestors that are missing": (
        finishing(lambda tree: replace(tree, ancestors=torch.eye(tree.nodes).bool())),
        "TokenTree.ancestors",
    ),
    "siblings that are the same": (
        finishing(lambda tree: replace(tree, tokens=put(tree.tokens, 2, tree.tokens[1]))),
        "siblings: expected different tokens",
    ),
    "columns for tokens": (Columns, "the node at"),
    "a token that is none": (
        finishing(lambda tree: replace(tree, tokens=put(tree.tokens, -1, 99))),
        "TokenTree.tokens",
    ),
    "another root": (
        finishing(lambda tree: replace(tree, tokens=put(tree.tokens, 0, 1))),
        "the root: expected the newest token, 7",
    ),
    "probabilities of others": (
        finishing(lambda tree: replace(tree, log_q=tree.log_q.roll(1))),
        "log_q of the node",
    ),
    "probabilities that are missing": (
        finishing(lambda tree: replace(tree, log_q=tree.log_q[1:])),
        "shape of TokenTree.log_q",
    ),
    "routes that lead elsewhere": (
        finishing(
            lambda tree: replace(tree, routes=None if tree.routes is None else tree.routes.flip(0))
        ),
        "TokenTree.routes",
    ),
    "samples in a greedy round": (
        finishing(lambda tree: replace(tree, proposal="sampled")),
        "proposal at temperature 0",
    ),
    "samples without a distribution": (
        finishing(lambda tree: replace(tree, q=None), "sampled"),
        "expected q and q_row",
    ),
    "a distribution that is none": (
        finishing(lambda tree: replace(tree, q=None if tree.q is None else 2 * tree.q), "sampled"),
        "TokenTree.q: expected probabilities",
    ),
    "rows of other distributions": (
        finishing(
            lambda tree: replace(tree, q_row=None if tree.q_row is None else put(tree.q_row, 1, 3)),
            "sampled",
        ),
        "q_row of node",
    ),
    "a budget of depth that is ignored": (without_budget("depth"), "the budget's depth"),
    "a budget of nodes that is ignored": (without_budget("nodes"), "the budget's nodes"),
    "a budget of passes that is ignored": (without_budget("passes"), "the budget's passes"),
    "a depth that is exceeded": (TooDeep, "max_depth, found"),
    "nodes that are too many": (TooMany, "max_nodes, found"),
    "passes that the drafter has not": (Unreachable, r"context\.reach"),
    "no room for the root": (Nameless, "max_depth and max_nodes"),
    "tokens that are not proposed": (Everything, "expected a token that the drafter proposes"),
    "a round that is remembered": (Remembering, "node at"),
    "candidates of another row": (OtherRow, "node at"),
    "parents that do not exist": (WrongParents, "a frontier"),
    "blocks without tokens": (WrongTokens, "a frontier"),
    "a first frontier with a token": (NotTheRoot, "a frontier"),
    "blocks that stand elsewhere": (Elsewhere, "was expanded at"),
    "numbers from nowhere": (Drawing, "node at|same generator"),
    "choices that pretend to be drawn": (Pretending, "distribution of sampled output"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_planted_defect_is_found_and_named(defect: str) -> None:
    build, said = BROKEN[defect]
    with pytest.raises(ContractError, match=said):
        check_tree_builder(build, blocks=(2,) if defect == "candidates of another row" else (1, 2))


class Both(UnionTree):
    """Two parts, each with a tree of its own, which keep all promises."""

    def __init__(self, context: BuildContext, proposal: str = "deterministic") -> None:
        tree = {"name": "static", "template": {"": 2, "0": 2}, "proposal": proposal}
        components = replace(context, components=everything())
        super().__init__(UnionTreeConfig([tree, tree], 6), components)


class Uncut(Both):
    """More nodes than there may be."""

    def _budgets(self, context: RoundContext) -> list[int]:
        self._nodes = 32
        return super()._budgets(context)


class Doubled(Both):
    """The first part's children twice."""

    def finish(self) -> TokenTree:
        tree = super().finish()
        siblings = (tree.parents == 0).nonzero().flatten()
        if len(siblings) < 2:
            return tree
        return replace(tree, tokens=put(tree.tokens, int(siblings[1]), tree.tokens[siblings[0]]))


class OwnDraws(Both):
    """What both parts have drawn is said to be drawn from one q alone."""

    def finish(self) -> TokenTree:
        tree = super().finish()
        if tree.q is None or tree.q_row is None:
            return tree
        return replace(tree, q=torch.full_like(tree.q, 1 / tree.q.shape[-1]))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Uncut, "tree.(nodes|drafted) in a round of .* with several drafters"),
        (Doubled, "siblings: expected different tokens"),
        (lambda context: OwnDraws(context, "sampled"), "the distribution of sampled output"),
    ],
    ids=["uncut", "doubled", "other draws"],
)
def test_a_defect_of_a_tree_of_several_drafters_is_found(build: Any, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        check_tree_builder(build, blocks=(1,))


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_a_tree_of_several_drafters_without_a_defect_passes(proposal: str) -> None:
    check_tree_builder(lambda context: Both(context, proposal), blocks=(1,))


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_the_builder_without_a_defect_passes(proposal: str) -> None:
    check_tree_builder(lambda context: Mine(context, proposal), blocks=(1, 2))
