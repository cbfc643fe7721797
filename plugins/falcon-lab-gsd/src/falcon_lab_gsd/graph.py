"""A draft graph (arXiv 2407.16207): nodes with the same newest tokens are one.

A model that drafts token by token writes the same words on several branches, after tokens that
hardly matter any more. Where the newest R + 1 tokens of a candidate are those of a node that is
there, an edge leads to that node, and what the drafter says below it is not computed again. The
target verifies trees, so the graph is unrolled: a node has a copy for every way that leads to it,
and all that is below the node is below its copies.

A drafter's keys and values of a copy would be others than the node's. What was accepted across such
an edge must therefore be read again: a draft model of ``falcon-lab-sps`` and a ``SelfDrafter`` drop
all that is provisional when a round ends, and read every accepted token anew.

Shapes: F blocks of a pass, m candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, DraftOutput, Frontier, RoundContext, TreeBuilder
from falcon_lab.tree import TokenTree, listed_tree
from falcon_lab.trees.template_tree import candidates
from falcon_lab_gsd import GsdConfig


class Edge(NamedTuple):
    """A way from a node to one below it.

    Attributes:
        node: the place of the latter.
        log_q: its log-probability after the former.
        goes_on: whether anything is drafted below it.
        merged: whether the node was there before the edge.
    """

    node: int
    log_q: float
    goes_on: bool
    merged: bool


@dataclass(slots=True)
class Node:
    """A node of the graph.

    Attributes:
        token: what it proposes.
        above: place of the node that it was first found below; -1 for the root.
        block: the block of its pass that it grew out of.
        score: sum of the log-probabilities on that way.
        edges: to the nodes below it.
    """

    token: int
    above: int
    block: int
    score: float
    edges: list[Edge] = field(default_factory=list)


@dataclass(slots=True)
class Work:
    """What drafting took, and what it would have taken without merging; summed over rounds.

    Attributes:
        rounds: trees that were finished.
        passes: of the drafter.
        blocks: tokens that it read in these passes, the root's among them.
        nodes: of the unrolled trees.
        copies: of them, those behind a merged edge.
        saved: copies with something below them: blocks that were not computed.
    """

    rounds: int = 0
    passes: int = 0
    blocks: int = 0
    nodes: int = 0
    copies: int = 0
    saved: int = 0


class GsdTree(TreeBuilder):
    """Grow a graph by the drafter's likeliest candidates, and unroll it.

    A pass expands what the pass before has added. Of the unrolled nodes the likeliest ``nodes`` are
    verified, which are always prefix-closed. All of it is decided by the drafter's probabilities,
    at any temperature, so the tree is "deterministic".

    Attributes:
        work: what it took so far.
        copies: nodes of the latest tree that stand behind a merged edge.

    Args:
        config: limits and thresholds.
        context: gives k.

    Raises:
        FalconLabError: the drafter has more than one token a pass.
    """

    def __init__(self, config: GsdConfig, context: BuildContext) -> None:
        if context.block > 1:
            raise FalconLabError(
                f"tree 'gsd' merges nodes of a drafter of one token a pass, and this one drafts "
                f"{context.block}; choose sps, eagle or selfspec, or tree dynamic"
            )
        self.max_depth = context.reach(config.depth)
        self.max_nodes = config.nodes + 1
        repeat = config.repeat_threshold
        self.shared_suffix = None if repeat is None else repeat + 1
        self._width = config.width
        self._least = _log(config.prob_threshold)
        self._apart = _log(config.sibling_threshold)
        self.work = Work()
        self.copies: set[int] = set()

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._context, budget = context, context.budget
        self._depth, self._nodes = budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=1
        )
        self._before = context.text(self.shared_suffix or 1)[:-1]
        self._graph = [Node(int(context.root), -1, 0, 0.0)]
        self._stands = [0]  # nodes at which the blocks of this pass stand
        self._passes = 0
        self._alike: dict[tuple[int, ...], list[int]] = {}  # newest tokens -> nodes
        if self._depth < 1 or self._nodes < 1:
            return None
        return Frontier.root(context.root.device)

    def grow(self, output: DraftOutput) -> Frontier | None:
        """Take in the candidates of one pass."""
        self._passes += 1
        self.work.passes += 1
        self.work.blocks += len(self._stands)
        if not output.logits.shape[1]:
            return None
        width = min(self._width, output.logits.shape[-1])
        tokens, log_q, _ = candidates(output, width, "deterministic", self._context)
        self._open: list[int] = []  # nodes that are new and go on
        rows = zip(tokens[:, 0].tolist(), log_q[:, 0].tolist(), strict=True)
        for block, (at, (found, own)) in enumerate(zip(self._stands, rows, strict=True)):
            self._branch(at, block, found, own)
        return None if self._passes == self._depth else self._frontier()

    def finish(self) -> TokenTree:
        """Return the likeliest nodes of the unrolled graph."""
        tokens, parents, log_q = list[int](), list[int](), list[float]()
        below, copied, depth = [0], [False], [0]  # of every tree node
        order = 0
        waiting: list[tuple[float, int, int, Edge]] = []  # most likely first

        def offer(place: int, score: float) -> None:
            nonlocal order
            for edge in self._graph[below[place]].edges:
                order += 1
                heappush(waiting, (score - edge.log_q, order, place, edge))

        offer(0, 0.0)
        while waiting and len(tokens) < self._nodes:
            score, _, parent, edge = heappop(waiting)
            tokens.append(self._graph[edge.node].token)
            parents.append(parent)
            log_q.append(edge.log_q)
            below.append(edge.node)
            copied.append(edge.merged or copied[parent])
            depth.append(depth[parent] + 1)
            if edge.goes_on and depth[-1] < self._depth:
                offer(len(tokens), score)
        self._count(parents, copied)
        return listed_tree(self._context.root, tokens, parents, log_q)

    def _frontier(self) -> Frontier | None:
        """Return blocks at the likeliest of the new nodes, at most one for each of the tree's."""
        graph, device = self._graph, self._context.root.device
        self._stands = sorted(self._open, key=lambda node: -graph[node].score)[: self._nodes]
        for nodes in self._alike.values() if len(self._open) > len(self._stands) else ():
            # What will not be expanded has nothing to take over.
            nodes[:] = [node for node in nodes if node not in self._open or node in self._stands]
        if not self._stands:
            return None
        return Frontier(
            torch.tensor([[graph[at].token] for at in self._stands], device=device),
            torch.tensor([graph[at].block for at in self._stands], device=device),
        )

    def _branch(self, at: int, block: int, tokens: list[int], log_q: list[float]) -> None:
        """Add the edges of a node to its candidates, the likeliest of which comes first."""
        for token, own in zip(tokens, log_q, strict=True):
            if not own > -math.inf or own < log_q[0] + self._apart:
                return
            # Rounding must not make a child likelier than its parent.
            self._graph[at].edges.append(self._edge(at, block, token, min(own, 0.0)))

    def _edge(self, at: int, block: int, token: int, log_q: float) -> Edge:
        """Return the edge from a node to one of its candidates, a new node or a merged one."""
        goes_on = log_q >= self._least
        way = [*self._way(at)]
        key = self._newest(token, way) if goes_on else None
        if key is not None:
            for node in self._alike.get(key, ()):
                if node not in way:
                    return Edge(node, log_q, goes_on, merged=True)
        self._graph.append(Node(token, at, block, self._graph[at].score + log_q))
        new = len(self._graph) - 1
        if goes_on:
            self._open.append(new)
        if key is not None:
            self._alike.setdefault(key, []).append(new)
        return Edge(new, log_q, goes_on, merged=False)

    def _way(self, at: int) -> list[int]:
        """Return a node and what it was first found below, up to the root."""
        found = []
        while at >= 0:
            found.append(at)
            at = self._graph[at].above
        return found

    def _newest(self, token: int, way: list[int]) -> tuple[int, ...] | None:
        """Return the newest R + 1 tokens of a candidate, itself first; None: there are fewer."""
        if self.shared_suffix is None:
            return None
        behind = [self._graph[node].token for node in way] + self._before[::-1]
        found = (token, *behind[: self.shared_suffix - 1])
        return found if len(found) == self.shared_suffix else None

    def _count(self, parents: list[int], copied: list[bool]) -> None:
        work = self.work
        self.copies = {place for place, is_copy in enumerate(copied) if is_copy}
        work.rounds += 1
        work.nodes += len(parents)
        work.copies += len(self.copies)
        work.saved += len(self.copies & set(parents))


def _log(share: float) -> float:
    return math.log(share) if share else -math.inf
