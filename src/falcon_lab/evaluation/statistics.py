"""How sure a speed-up is: the paired bootstrap over prompts.

Shapes: P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from falcon_lab.evaluation.rows import PromptRow

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A ratio with its percentile interval; no interval from fewer than two prompts."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def above_one(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1.0


@dataclass(frozen=True)
class Comparison:
    """Whether one method is faster than another.

    Attributes:
        method: the one asked about.
        than: the one it is compared with.
        speedup: time per token of ``than`` over that of ``method``.
        faster: whether the whole interval lies above 1.
    """

    method: str
    than: str
    speedup: Interval
    faster: bool


def paired_ratio(
    base: tuple[Sequence[float], Sequence[int]],
    other: tuple[Sequence[float], Sequence[int]],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Total time per token of ``base`` over that of ``other``: how much faster ``other`` is.

    Each is (seconds ``[P]``, new tokens ``[P]``), prompt by prompt in the same order. A resample
    draws P prompts with replacement and takes both methods' figures of each (Efron & Tibshirani,
    *An Introduction to the Bootstrap*, 1993, ch. 13: the percentile interval), so that what makes
    a prompt hard for both does not widen the interval.

    Raises:
        ValueError: for unequal lengths, no prompts, or no tokens at all.
    """
    table = np.array([*base, *other], dtype=np.float64)  # [4, P]; ragged input is a ValueError
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError("a paired ratio needs the same prompts, at least one, on both sides")
    if not table[1].sum() or not table[3].sum():
        raise ValueError("a method that wrote no token has no time per token")
    ratio = float(_ratio(table.sum(axis=1)))
    if table.shape[1] < 2:
        return Interval(ratio, None, None)
    draws = np.random.default_rng(seed).integers(
        table.shape[1], size=(resamples, table.shape[1])
    )  # [R, P]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = _ratio(table[:, draws].sum(axis=2))  # [R]
    ratios = ratios[np.isfinite(ratios)]  # a resample of empty answers alone says nothing
    tail = (1 - confidence) / 2
    low, high = np.quantile(ratios, [tail, 1 - tail])
    return Interval(ratio, float(low), float(high))


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    base_seconds, base_tokens, seconds, tokens = sums
    return np.asarray((base_seconds / base_tokens) / (seconds / tokens))


def speedup(base: Sequence[PromptRow], other: Sequence[PromptRow], *, seed: int = 0) -> Interval:
    """End-to-end speed-up of ``other`` over ``base``: wall time per token, prefill included."""
    pairs = pair(base, other)
    return paired_ratio(
        ([a.times.wall for a, _ in pairs], [len(a.tokens) for a, _ in pairs]),
        ([b.times.wall for _, b in pairs], [len(b.tokens) for _, b in pairs]),
        seed=seed,
    )


def compare(method: Sequence[PromptRow], than: Sequence[PromptRow], *, seed: int = 0) -> Comparison:
    """Is ``method`` faster than ``than``? Yes only if the whole interval says so."""
    interval = speedup(than, method, seed=seed)
    return Comparison(method[0].method, than[0].method, interval, interval.above_one)


def pair(
    base: Sequence[PromptRow], other: Sequence[PromptRow]
) -> list[tuple[PromptRow, PromptRow]]:
    """The rows of the same prompt, side by side, in ``base``'s order.

    Raises:
        ValueError: when the two do not hold the same prompts.
    """
    by_prompt = {row.prompt: row for row in other}
    if len(by_prompt) != len(other) or {row.prompt for row in base} != set(by_prompt):
        raise ValueError("the two methods were not measured on the same prompts")
    return [(row, by_prompt[row.prompt]) for row in base]
