"""What is accepted how often: paths of a tree, and ranks by depth.

Shapes: D depths, W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from falcon_lab.trees.paths import Path
from falcon_lab.tuning.probing import Look


@dataclass(frozen=True)
class Odds:
    """What rounds do under one rule of stopping.

    Attributes:
        gain: path -> share of the rounds that would accept it, were it in the tree.
        reach: entry d: share of the rounds that draft d tokens deep or deeper; d is 0 to D.
        passes: entry j: share of the rounds that make j passes or more; entry 0 is 1.
        asked: entry j: share of the rounds in which the controller is asked after pass j.
    """

    gain: dict[Path, float]
    reach: list[float]
    passes: list[float]
    asked: list[float]


def odds(looks: Sequence[Look], block: int, most: int, log_threshold: float) -> Odds:
    """Count all paths of ``most`` passes at the most.

    A tree's expected tokens a round are 1 + Σ of its paths' gains: a round accepts a path when
    the path begins its true ranks, and the drafter was not stopped before.
    """
    gain: Counter[Path] = Counter()
    reach: Counter[int] = Counter()
    passes: Counter[int] = Counter()
    asked: Counter[int] = Counter()
    for look in looks:
        made = look.passes(block, most, log_threshold)
        deepest = min(look.limit, made * block)
        gain.update(look.ranks[:length] for length in range(1, min(deepest, len(look.ranks)) + 1))
        reach[deepest] += 1
        passes[made] += 1
        asked.update(j for j in range(1, made + 1) if j < most and j * block < look.limit)
    total = len(looks)
    return Odds(
        {path: count / total for path, count in gain.items()},
        _at_least(reach, most * block, total),
        _at_least(passes, most, total),
        [asked[j] / total for j in range(most + 1)],
    )


def _at_least(counts: Counter[int], most: int, total: int) -> list[float]:
    """Entry i: share of what is i or more."""
    return [sum(n for value, n in counts.items() if value >= i) / total for i in range(most + 1)]


@dataclass(frozen=True)
class DepthRow:
    """Depth d of an acceptance table.

    Attributes:
        depth: 1 is the root's child.
        rounds: that had a true token there, all before it being proposed.
        ranks: entry r: share of them whose true token is the candidate of rank r.
        beyond: share whose true token is none of these.
    """

    depth: int
    rounds: int
    ranks: list[float]
    beyond: float


def table(looks: Iterable[Look], ranks: int, *, first: bool = False) -> list[DepthRow]:
    """Acceptance by rank and depth, given that the path before is right.

    Args:
        looks: rounds.
        ranks: W, ranks that have an entry of their own.
        first: count only rounds whose path before is all first candidates, a chain's.
    """
    counts: dict[int, Counter[int]] = {}
    for look in looks:
        for depth in range(1, look.known + 1):
            before = look.ranks[: depth - 1]
            if len(before) < depth - 1 or (first and any(before)):
                break
            rank = look.ranks[depth - 1] if depth <= len(look.ranks) else ranks
            counts.setdefault(depth, Counter())[min(rank, ranks)] += 1
    return [_row(depth, counts[depth], ranks) for depth in sorted(counts)]


def _row(depth: int, counts: Counter[int], ranks: int) -> DepthRow:
    total = counts.total()
    return DepthRow(depth, total, [counts[r] / total for r in range(ranks)], counts[ranks] / total)
