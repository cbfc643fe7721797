"""Monte-Carlo tree search over what may follow a text.

An iteration goes down from the root to a node that was not opened before: from an opened node with
N visits to the child with the greatest

    mean reward + (c1 + ln((N + c2 + 1) / c2)) · P · √N / (1 + visits)

There it opens the node, which gets a child for every successor, and goes on at random, a successor
with a chance in proportion to its score, down to the depth. The reward is 1 and the sum of P on the
way; every node from the root to the one that was opened gets it, and a visit.

A search is a few thousand steps over a dozen numbers each, which plain lists do in a fraction of
the time that an array's operations take to begin.
"""

from __future__ import annotations

import math
from bisect import bisect
from random import Random

from falcon_lab_aded.successors import Known

CLOSED = -1
"""Place of the first child of a node that was not opened."""


class TreeSearch:
    """The tree of one search; node 0 is the root.

    Attributes:
        tokens: of every node.
        above: parent of every node.
        visits: of every node.

    Args:
        known: what may follow a context.
        vocabulary: V, by which two tokens make a context.
        before: the token before the root.
        root: the newest token.
        depth: of the tree.
        c1: weight of the scores.
        c2: how slowly it grows.
        random: of the ways below the tree.
    """

    def __init__(
        self,
        known: Known,
        vocabulary: int,
        before: int,
        root: int,
        *,
        depth: int,
        c1: float,
        c2: float,
        random: Random,
    ) -> None:
        self._known, self._vocabulary, self._before = known, vocabulary, before
        self._depth, self._c1, self._c2 = depth, c1, c2
        self._draw = random.random
        self.tokens = [root]
        self.above = [-1]
        self.visits = [0]
        self._scores = [0.0]
        self._rewards = [0.0]
        self._first = [CLOSED]
        self._last = [CLOSED]

    def run(self, iterations: int) -> None:
        """Make so many iterations."""
        scales = [
            (self._c1 + math.log((visits + self._c2 + 1) / self._c2)) * math.sqrt(visits)
            for visits in range(iterations)
        ]
        for _ in range(iterations):
            self._iterate(scales)

    def best(self, count: int) -> list[int]:
        """Return the nodes with the most visits, at most ``count``; parents come first."""
        visits = self.visits
        seen = [node for node in range(1, len(visits)) if visits[node]]
        # No child has more visits than its parent, and it was opened later.
        seen.sort(key=lambda node: -visits[node])
        return seen[:count]

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root to a node."""
        found = []
        while node:
            found.append(self.tokens[node])
            node = self.above[node]
        return found[::-1]

    def _iterate(self, scales: list[float]) -> None:
        first, last, tokens, vocabulary = self._first, self._last, self.tokens, self._vocabulary
        visits, rewards, scores = self.visits, self._rewards, self._scores
        node, way, along = 0, [0], 1.0
        before, token = self._before, tokens[0]
        while first[node] < last[node]:
            scale, greatest = scales[visits[node]], -1.0
            for child in range(first[node], last[node]):
                seen = visits[child]
                value = scale * scores[child] / (1 + seen)
                if seen:
                    value += rewards[child] / seen
                if value > greatest:
                    greatest, node = value, child
            way.append(node)
            before, token = token, tokens[node]
            along += scores[node]
        steps = self._depth - len(way) + 1
        if steps and first[node] == CLOSED:
            self._open(node, before * vocabulary + token)
        reward = along + self._below(before, token, steps)
        for each in way:
            visits[each] += 1
            rewards[each] += reward

    def _open(self, node: int, context: int) -> None:
        """Give a node its children."""
        found = self._known(context)
        count = len(found.tokens)
        self._first[node] = len(self.tokens)
        self._last[node] = len(self.tokens) + count
        self.tokens += found.tokens
        self._scores += found.scores
        self.above += [node] * count
        self.visits += [0] * count
        self._rewards += [0.0] * count
        self._first += [CLOSED] * count
        self._last += [CLOSED] * count

    def _below(self, before: int, token: int, steps: int) -> float:
        """Return the sum of the scores on a random way of at most so many steps."""
        total = 0.0
        for _ in range(steps):
            tokens, scores, sums = self._known(before * self._vocabulary + token)
            if not tokens:
                break
            place = bisect(sums, self._draw() * sums[-1], 0, len(sums) - 1)
            total += scores[place]
            before, token = token, tokens[place]
        return total
