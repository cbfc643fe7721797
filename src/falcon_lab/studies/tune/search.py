"""The static tree with the most expected tokens per second.

Expected tokens of a round are 1 + Σ gain over the tree's nodes, and its expected seconds are
verify(n) + Σ of the passes + fixed. Their ratio is maximised by Dinkelbach's iteration
(*Management Science* 13(7), 1967): for a price λ, in tokens a second, find the tree that maximises
tokens − λ·seconds, and take its own ratio as the next λ, until nothing is gained.

For one λ a tree of every size n is found at once. A node may be taken when its parent and all
siblings of lower ranks are there, so each node has one node that must come before it: its next
lower sibling, or its parent. A set that is closed under that is a tree's top, and the best top of
n nodes is a knapsack over the tree, exact for any gains (Johnson & Niemi, *Math. Oper. Res.* 8(1),
1983). A block that a later pass expands costs what its first child then weighs less.

So the result is the best of all trees of up to N nodes and a number of passes: exactly so without
a controller, for any verify(n), and with one when verify(n) is a straight line; otherwise among the
trees that are best when it is one.

Shapes: n nodes of a tree, N most of them, M nodes to choose from, k block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.replay import Odds
from falcon_lab.trees.paths import Path

CANDIDATES = 384
"""M: the nodes of the highest gain."""

ROUNDING = 1e-12

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Candidate:
    """A tree and what it estimates.

    Attributes:
        paths: its nodes.
        tokens: expected a round, the target's own one included.
        seconds: expected a round.
    """

    paths: tuple[Path, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Return expected tokens per second."""
        return self.tokens / self.seconds


def expected(
    paths: Iterable[Path], odds: Odds, costs: Costs, block: int, *, asking: bool = False
) -> Candidate:
    """Tokens and seconds that a tree is expected to need.

    Args:
        paths: a tree within the passes that ``odds`` was counted for.
        odds: of the rule of stopping.
        costs: of this machine.
        block: k.
        asking: whether a controller decides after every pass that another one may follow.
    """
    tree = tuple(sorted(paths, key=lambda path: (len(path), path)))
    height = len(tree[-1]) if tree else 0
    passes = -(-height // block)
    seconds = costs.fixed + _verifying(tree, odds, costs)
    for j in range(1, passes + 1):
        opened = {path[: (j - 1) * block] for path in tree if len(path) > (j - 1) * block}
        cost = costs.first if j == 1 else costs.later + costs.block * (len(opened) - 1)
        seconds += odds.passes[j] * cost
        if asking and j < passes:
            seconds += odds.asked[j] * costs.asking
    return Candidate(tree, 1 + sum(odds.gain.get(path, 0.0) for path in tree), seconds)


def _verifying(tree: tuple[Path, ...], odds: Odds, costs: Costs) -> float:
    """Estimate the expected seconds of the target's pass, over the nodes drafted by then."""
    reach, total = [*odds.reach, 0.0], 0.0
    nodes = [0] * len(odds.reach)
    for path in tree:
        nodes[len(path)] += 1
    count = 0
    for depth, here in enumerate(nodes):
        count += here
        if share := reach[depth] - reach[depth + 1]:
            total += share * costs.verifying(count)
    return total


def best_tree(
    odds: Odds, costs: Costs, block: int, nodes: int, *, asking: bool = False, floor: float = 0.0
) -> Candidate:
    """The best tree of up to ``nodes`` nodes within the passes of ``odds``.

    Args:
        odds: gains and reach of one number of passes and one rule of stopping.
        costs: of this machine.
        block: k.
        nodes: N.
        asking: whether a controller decides after every pass.
        floor: tokens a second that are had anyway: where nothing better is found, what comes back
            is no better than that.
    """
    forest = Forest(odds, block)
    slope = costs.slope(nodes)
    best = expected((), odds, costs, block, asking=asking)
    rate = max(best.rate, floor)
    while True:
        trees = forest.trees(nodes, rate * slope, rate * costs.block)
        found = [expected(tree, odds, costs, block, asking=asking) for tree in trees]
        top = max(found, key=lambda candidate: candidate.rate, default=best)
        if top.rate > best.rate:
            best = top
        if top.rate <= rate * (1 + ROUNDING):
            return best
        rate = top.rate


class Forest:
    """The nodes to choose from, each with the one that must be there before.

    Args:
        odds: their gains.
        block: k.
        candidates: M.
    """

    def __init__(self, odds: Odds, block: int, candidates: int = CANDIDATES) -> None:
        depth = len(odds.reach) - 1
        gains = [(gain, path) for path, gain in odds.gain.items() if len(path) <= depth]
        likeliest = sorted(gains, key=lambda g: (-g[0], len(g[1]), g[1]))[:candidates]
        self.paths = sorted(_closed(path for _, path in likeliest), key=lambda p: (len(p), p))
        number = {path: at for at, path in enumerate(self.paths)}
        self._child = [number.get((*path, 0), -1) for path in self.paths]
        self._sibling = [number.get((*path[:-1], path[-1] + 1), -1) for path in self.paths]
        self._gain = [odds.gain.get(path, 0.0) for path in self.paths]
        self._reach = [odds.reach[len(path)] for path in self.paths]
        self._opens = [
            len(path) > block and len(path) % block == 1 % block and path[-1] == 0
            for path in self.paths
        ]

    def trees(self, most: int, node: float, block: float) -> list[list[Path]]:
        """Return the best tree of every size from 1 to ``most``.

        Args:
            most: N.
            node: price of a node that is verified.
            block: price of a block that a later pass expands.
        """
        best: list[Vector] = [np.zeros(1)] * len(self.paths)
        split: list[list[int]] = [[]] * len(self.paths)
        for at in reversed(range(len(self.paths))):  # children and later siblings are done
            price = self._reach[at] * (node + block * self._opens[at])
            below, beside = (best[i] if i >= 0 else np.zeros(1) for i in self._next(at))
            joined, split[at] = _join(below, beside, most - 1)
            best[at] = np.concatenate(([0.0], joined + (self._gain[at] - price)))
        sizes = len(best[0]) if self.paths else 1
        return [self._pick(split, size) for size in range(1, sizes)]

    def _next(self, at: int) -> tuple[int, int]:
        return self._child[at], self._sibling[at]

    def _pick(self, split: list[list[int]], size: int) -> list[Path]:
        taken, open_ends = [], [(0, size)]
        while open_ends:
            at, count = open_ends.pop()
            if count == 0:
                continue
            taken.append(self.paths[at])
            below = split[at][count - 1]
            child, sibling = self._next(at)
            open_ends += [(child, below), (sibling, count - 1 - below)]
        return taken


def _join(a: Vector, b: Vector, most: int) -> tuple[Vector, list[int]]:
    """Return for every n the most that n nodes of both bring, and how many of them are of ``a``."""
    size = min(len(a) + len(b) - 2, most) + 1
    best = np.full(size, -np.inf)
    of_a = np.zeros(size, dtype=np.int64)
    for i in range(min(len(a), size)):
        part = a[i] + b[: size - i]
        here = best[i : i + len(part)]
        better = part > here
        here[better] = part[better]
        of_a[i : i + len(part)][better] = i
    return best, of_a.tolist()


def _closed(paths: Iterable[Path]) -> set[Path]:
    """The paths with all that must come before them."""
    found: set[Path] = set()
    for path in paths:
        needed = path
        while needed and needed not in found:
            found.add(needed)
            needed = (*needed[:-1], needed[-1] - 1) if needed[-1] else needed[:-1]
    return found
