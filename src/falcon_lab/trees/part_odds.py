"""How likely what the parts of a union propose is accepted, by what the text has shown so far.

A part claims a probability for every node. Which share of its claims came true is counted, over all
of them and among nodes of about the same claim and depth, beside a prior that weighs as much as a
few claims. A node's chance is its claim times the share of its class, so that nodes of a class keep
the part's own order. Of heads, which are trained to predict the target, four fifths are assumed to
come true. What was looked up claims nothing, and has priors of its own: its first token is seldom
right, and where it is, the next one often is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from falcon_lab.trees.merging import Claim

ASSUMED, WEIGHT = 0.8, 4.0
"""Share of a part's claims that comes true, before any was seen, and what that weighs: as much as
so many claims of certainty; the same for a class of nodes, whose prior is its part's share."""

FOUND_FIRST, FOUND_LATER = 0.25, 0.6
"""Chances of the first token of what was looked up, and of any later one, before any was seen; on
held-out prompts of two targets 0.16 to 0.28, and 0.5 to 0.8."""

LEAST_CLAIM, DEEPEST = 5, 3
"""The last class of claims, by halves (1 to 1/2, 1/2 to 1/4, …), and that of depths, by doubling
(1, 2 and 3, 4 and more)."""

SUREST = 0.999


@dataclass(slots=True)
class Count:
    """Claims and what came of them.

    Attributes:
        claimed: the sum of the claims of nodes whose parent was accepted.
        accepted: how many of these nodes were.
    """

    claimed: float = 0.0
    accepted: int = 0

    def add(self, claim: float, *, accepted: bool) -> None:
        """Count a node."""
        self.claimed += claim
        self.accepted += accepted

    def share(self, assumed: float) -> float:
        """Return the share of the claims that came true, ``assumed`` before any was seen."""
        return (self.accepted + WEIGHT * assumed) / (self.claimed + WEIGHT)


class PartOdds:
    """What a text has shown of the parts.

    Args:
        parts: how many.
    """

    def __init__(self, parts: int) -> None:
        self._parts = [Count() for _ in range(parts)]
        self._found: set[int] = set()
        self._classes: dict[tuple[int, int, int], Count] = {}
        self._rounds = 0

    def looks_up(self, part: int) -> None:
        """Take note that a part looks its candidates up, so that its claims are none."""
        self._found.add(part)

    def chance(self, claims: Sequence[Claim], depth: int) -> float:
        """Return how likely a node is accepted where its parent was: by any part that has it."""
        missed = math.prod(1 - self._of_one(claim, depth) for claim in claims)
        return min(1 - missed, SUREST)

    def _of_one(self, claim: Claim, depth: int) -> float:
        seen = self._classes.get(_class(claim, depth), Count())
        return min(math.exp(claim.log_q) * seen.share(self._assumed(claim.part, depth)), SUREST)

    def _assumed(self, part: int, depth: int) -> float:
        """Return what is assumed of the claims of a class of nodes."""
        if part in self._found:
            return FOUND_FIRST if depth == 1 else FOUND_LATER
        return self._parts[part].share(ASSUMED)

    def add(self, claims: Sequence[Claim], depth: int, *, accepted: bool) -> None:
        """Count a node whose parent was accepted."""
        for claim in claims:
            claimed = math.exp(claim.log_q)
            self._parts[claim.part].add(claimed, accepted=accepted)
            of_class = self._classes.setdefault(_class(claim, depth), Count())
            of_class.add(claimed, accepted=accepted)

    def end_round(self) -> None:
        """Count a round."""
        self._rounds += 1

    def shares(self, nodes: int) -> list[int]:
        """Divide nodes among the parts, each one at the least while there are any.

        The shares are as the tokens that were accepted of each part a round, a token a round being
        assumed of each with the weight of ``WEIGHT`` rounds.
        """
        gains = [(part.accepted + WEIGHT) / (self._rounds + WEIGHT) for part in self._parts]
        first = [int(part < nodes) for part in range(len(gains))]
        rest = nodes - sum(first)
        ends = [0, *(round(rest * gain / sum(gains)) for gain in accumulate(gains))]
        return [one + end - begin for one, (begin, end) in zip(first, pairwise(ends), strict=True)]


def _class(claim: Claim, depth: int) -> tuple[int, int, int]:
    halves = int(min(-claim.log_q / math.log(2), LEAST_CLAIM))
    return claim.part, halves, min(depth.bit_length(), DEEPEST)
