"""Trees whose shape the drafter's own probabilities decide: EAGLE-2's, and the likeliest of a size.

A path's score is the sum of the drafter's log-probabilities along it, so a node never scores higher
than its parent. Hence the n best candidates are always prefix-closed; and what is not among the n
best of a level, or of all candidates so far, has nothing below it that could ever be. Both are left
out while the tree grows, and the result is the same.

Candidates are few, and the host waits for the device once a pass; so they are compared in plain
Python, where a dozen costs less than one more kernel.

Which row of a pass a node's candidates come from is the rule of ``layout.py``: the nodes of one
depth below a block's node share a row.

Shapes: F blocks of a pass, k block, m candidates of a row, n most nodes of the tree, W width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.plugins.builtins import DynamicTreeConfig, OptimalTreeConfig
from falcon_lab.tree import TokenTree, ancestor_matrix
from falcon_lab.trees.template_tree import candidates
from falcon_lab.trees.templates import default_depth


class Node(NamedTuple):
    """A candidate.

    Attributes:
        token: what it proposes.
        parent: its parent's place among the candidates; -1 for the root.
        depth: 0 for the root.
        score: sum of the log-probabilities on its path.
        log_q: its own log-probability.
        block: the block of its pass that it grew out of.
    """

    token: int
    parent: int
    depth: int
    score: float
    log_q: float
    block: int


ROOT = Node(token=0, parent=-1, depth=0, score=0.0, log_q=0.0, block=0)
"""Its token stays on the device, as it is not needed here."""


class BestFirstTree(TreeBuilder):
    """Keep the ``nodes`` likeliest candidates of all its passes.

    The drafter's own probabilities decide, at any temperature; they choose the drafts, never their
    acceptance, so the tree is always "deterministic". Equal scores go to the shallower node, then
    to the one below the better parent, then to the lower rank. What the drafter does not propose
    (``-inf``, or a row that is not there) has no place in the tree.

    Args:
        block: k of the drafter.
        nodes: n, the root not counted.
        depth: longest path.
        beam: most blocks of a pass; ``nodes`` is no limit.
        width: W, candidates of a row; ``nodes`` is no limit.
    """

    def __init__(self, block: int, *, nodes: int, depth: int, beam: int, width: int) -> None:
        self.block = block
        self.max_depth = depth
        self.max_nodes = nodes + 1
        self.beam = beam
        self.width = width

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._context = context
        self._depth, self._nodes = context.budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=self.block
        )
        self._reached = 0  # depth of the deepest candidates
        self._candidates = [ROOT]
        self._stands = [0]  # candidates at which the blocks of this pass stand
        if self._depth < 1 or self._nodes < 1:
            return None
        return Frontier.root(context.root.device)

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take in the candidates of one pass."""
        rows = min(output.logits.shape[1], self.block, self._depth - self._reached)
        if rows == 0:
            return None
        width = min(self.width, self._nodes)
        tokens, log_q, _ = candidates(output, width, "deterministic", self._context)
        self._take(tokens[:, :rows].tolist(), log_q[:, :rows].tolist())
        self._reached += rows
        if rows < self.block or self._reached == self._depth:
            return None
        return self._frontier()

    def finish(self) -> TokenTree:
        """Return the tree of the best candidates so far."""
        found, device = self._candidates, self._context.root.device
        best = sorted(range(1, len(found)), key=lambda at: -found[at].score)[: self._nodes]
        kept = [0, *sorted(at for at in best if found[at].score > -math.inf)]
        number = {at: place for place, at in enumerate(kept)}
        parents = torch.tensor([-1, *(number[found[at].parent] for at in kept[1:])], device=device)
        drafts = torch.tensor([found[at].token for at in kept[1:]], dtype=torch.long, device=device)
        return TokenTree(
            torch.cat((self._context.root.reshape(1), drafts)),
            parents,
            torch.tensor([found[at].depth for at in kept], device=device),
            ancestor_matrix(parents),
            "deterministic",
            torch.tensor([found[at].log_q for at in kept], device=device),
        )

    def _take(self, tokens: list[list[list[int]]], log_q: list[list[list[float]]]) -> None:
        """Add the n best nodes of every row of a pass; ``[F][rows][m]`` are its candidates."""
        found = self._candidates
        above = list(enumerate(self._stands))  # block, node
        for row in range(len(tokens[0])):
            level = [
                Node(token, node, found[node].depth + 1, found[node].score + own, own, block)
                for block, node in above
                for token, own in zip(
                    tokens[block][row], map(_sound, log_q[block][row]), strict=True
                )
            ]
            level.sort(key=lambda node: -node.score)  # stable: parents, then ranks, stay in order
            first = len(found)
            found += level[: self._nodes]
            above = [(found[at].block, at) for at in range(first, len(found))]
        self._stands = [at for _, at in above]

    def _frontier(self) -> Frontier | None:
        """Return blocks at the best of the deepest nodes, while what is below them may count."""
        found, device = self._candidates, self._context.root.device
        scores = sorted((node.score for node in found[1:]), reverse=True)
        # A node that does no more than equal the n-th best has nothing but worse ones below it.
        bar = scores[self._nodes - 1] if len(scores) >= self._nodes else -math.inf
        beam = min(self.beam, self._nodes)
        self._stands = [at for at in self._stands[:beam] if found[at].score > bar]
        if not self._stands:
            return None
        return Frontier(
            torch.tensor([self._path(at) for at in self._stands], device=device),
            torch.tensor([found[at].block for at in self._stands], device=device),
        )

    def _path(self, at: int) -> list[int]:
        """Return the tokens of the block that ends at a candidate."""
        path = []
        for _ in range(self.block):
            path.append(self._candidates[at].token)
            at = self._candidates[at].parent
        return path[::-1]


def _sound(log_q: float) -> float:
    """Bound a log-probability: rounding must not put a child before its parent."""
    return -math.inf if math.isnan(log_q) else min(log_q, 0.0)


class DynamicTree(BestFirstTree):
    """Expand the best blocks of every pass, then rerank all candidates (arXiv 2406.16858, §4).

    A pass expands the ``beam`` nodes of the highest cumulative probability among those that the
    pass before put at its last depth; every row gives ``width`` candidates; the ``nodes`` best of
    all make the tree. With k = 1 that is EAGLE-2. With more, a pass adds k levels, the candidates
    of a row being shared by all nodes of the block at that depth.

    Args:
        config: the limits.
        context: gives k.
    """

    def __init__(self, config: DynamicTreeConfig, context: BuildContext) -> None:
        block = context.block
        depth = default_depth(block) if config.depth is None else config.depth
        super().__init__(
            block,
            nodes=config.nodes,
            depth=context.reach(depth),
            beam=config.beam,
            width=config.width,
        )


class OptimalTree(BestFirstTree):
    """The ``nodes`` paths of the highest probability among all paths of ``passes`` passes.

    A block's rows are taken as independent of each other, so a path's probability is a product of
    one entry per row; over one pass that is the draft tree of a block-diffusion drafter (DDTree).
    If the drafter's probabilities were the target's, no tree of that size and depth would have more
    tokens accepted. Every node that could have one of the best below it is expanded, and every
    candidate that could be one is looked at, so nothing is approximated; a pass may take up to
    ``nodes`` blocks, though it rarely expands more than a few.

    Args:
        config: the size, and the passes.
        context: gives k.
    """

    def __init__(self, config: OptimalTreeConfig, context: BuildContext) -> None:
        block, passes = context.block, config.passes
        depth = default_depth(block) if passes is None else passes * block
        nodes = config.nodes
        reach = context.reach(depth)
        super().__init__(block, nodes=nodes, depth=reach, beam=nodes, width=nodes)
