"""The tree of a union of drafters: each has a builder of its own, and all share one tree.

A part's builder sees its own drafter's passes alone, as if there were no other. When all have
finished, their trees are joined (``merging.py``) and cut to ``nodes`` by how likely each node is
accepted (``part_odds.py``). Drawn nodes cannot be cut afterwards, so a part that draws is given its
share of the nodes before the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    BuildContext,
    DraftOutput,
    Frontier,
    RoundContext,
    RoundOutcome,
    TreeBuilder,
)
from falcon_lab.plugins.builtins import UnionTreeConfig
from falcon_lab.tree import TokenTree
from falcon_lab.trees.merging import MergedNode, cut, joined, merged_tree
from falcon_lab.trees.part_odds import PartOdds


class _Finished(NamedTuple):
    """Hold the tree of a round: the parts' own, all nodes joined, and the numbers of the kept."""

    trees: list[TokenTree]
    nodes: list[MergedNode]
    order: list[int]


class UnionTree(TreeBuilder):
    """Grow a tree for each of a union's drafters, and join them.

    Args:
        config: the builders and the size.
        context: of a drafter that is made of others.

    Raises:
        FalconLabError: there is not one builder for every drafter.
    """

    def __init__(self, config: UnionTreeConfig, context: BuildContext) -> None:
        drafters, builders = len(context.parts), len(config.parts)
        if drafters != builders:
            raise FalconLabError(
                f"tree 'union' has {builders} parts, and its drafter has {drafters or 'none'}; "
                "give a drafter {name: union, parts: […]} and a tree for each of its parts, in the "
                "same order"
            )
        assert context.components is not None
        self.builders = tuple(
            context.components.build("tree_builder", node, part)
            for node, part in zip(config.parts, context.parts, strict=True)
        )
        chosen = all(builder.proposal == "deterministic" for builder in self.builders)
        self.proposal = "deterministic" if chosen else "mixed"
        self.max_depth = max(builder.max_depth for builder in self.builders)
        self.max_nodes = config.nodes + 1
        self.reset()

    def reset(self) -> None:
        """Forget what the text before has shown of the parts."""
        self._odds = PartOdds(len(self.builders))
        self._finished: _Finished | None = None
        for builder in self.builders:
            builder.reset()

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round of every part, within ``context.budget``."""
        most, self._root = context.budget.nodes, context.root
        self._nodes = min(self.max_nodes - 1, self.max_nodes if most is None else most)
        return _together(
            [
                builder.start(replace(context, budget=replace(context.budget, nodes=nodes)))
                for builder, nodes in zip(self.builders, self._budgets(context), strict=True)
            ]
        )

    def _budgets(self, context: RoundContext) -> list[int]:
        """Return the nodes of every part: a share for one that draws, and all for the others.

        What was chosen can be cut afterwards.
        """
        shares = self._odds.shares(self._nodes)
        chooses = [context.sampling.greedy or b.proposal == "deterministic" for b in self.builders]
        return [self._nodes if c else share for c, share in zip(chooses, shares, strict=True)]

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take in a pass of every part that made one."""
        for part, of_part in enumerate(output.parts):
            if of_part is not None and of_part.paths is not None:
                self._odds.looks_up(part)
        return _together(
            [
                None if of_part is None else builder.grow(of_part)
                for builder, of_part in zip(self.builders, output.parts, strict=True)
            ]
        )

    def finish(self) -> TokenTree:
        """Return the tree of all parts.

        Raises:
            FalconLabError: a part has drawn more nodes than its budget has.
        """
        trees = [builder.finish() for builder in self.builders]
        nodes = joined(trees, self._odds.chance)
        order = cut(nodes, self._nodes)
        self._finished = _Finished(trees, nodes, order)
        return merged_tree(self._root, nodes, order, trees)

    def update(self, outcome: RoundOutcome) -> None:
        """Count what was accepted of every part."""
        if self._finished is None:
            return
        trees, nodes, order = self._finished
        path = {order[place] for place in outcome.path}
        for number in order[1:]:
            node = nodes[number]
            if node.parent in path:
                self._odds.add(node.claims, node.depth, accepted=number in path)
        self._odds.end_round()
        for part, (builder, tree) in enumerate(zip(self.builders, trees, strict=True)):
            own = [c.node for at in sorted(path) for c in nodes[at].claims if c.part == part]
            of_part = RoundOutcome(tree.max_depth, tree.drafted, len(own), [0, *own], tree)
            builder.update(of_part)


def _together(frontiers: Sequence[Frontier | None]) -> Frontier | None:
    """Return the frontier of all parts; None when none drafts on."""
    first = next((frontier for frontier in frontiers if frontier is not None), None)
    return None if first is None else replace(first, parts=tuple(frontiers))
