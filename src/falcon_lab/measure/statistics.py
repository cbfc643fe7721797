"""Say how sure a speed-up is, by the paired bootstrap over prompts, and over training seeds too.

Shapes: M figures, S training seeds, P prompts, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from falcon_lab.measure.records import Record, tokens_per_second

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A ratio, with its percentile interval; no interval from fewer than two prompts."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def above_one(self) -> bool:
        """Tell whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1.0


@dataclass(frozen=True)
class Comparison:
    """States whether one method is faster than another.

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
    """Divide the time per token of ``base`` by that of ``other``: how much faster it is.

    Each is (seconds ``[P]``, new tokens ``[P]``), prompt by prompt in the same order. A resample
    draws P prompts with replacement and uses both methods' figures of each (Efron & Tibshirani,
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
    sides = (table[:2, None], table[2:, None])
    return resampled(
        time_per_token_ratio, *sides, seed=seed, resamples=resamples, confidence=confidence
    )


def time_per_token_ratio(
    base: NDArray[np.float64], other: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how much faster ``other`` is, from ``[2, …]`` seconds and tokens of each."""
    return np.asarray((base[0] / base[1]) / (other[0] / other[1]))


def resampled(
    statistic: Callable[..., NDArray[np.float64]],
    *tables: NDArray[np.float64],
    seed: int = 0,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Return a statistic of sums over training seeds and prompts, with its interval over both.

    A resample draws each table's seeds with replacement, then the prompts with replacement, and
    takes every table's figures of each drawn seed on each drawn prompt. Prompts are drawn once for
    all seeds and all tables: every seed answers the same ones, so that more seeds do not make up
    for few prompts (crossed factors: Owen, *Annals of Applied Statistics* 1(2), 2007, the
    pigeonhole bootstrap). Seeds are drawn for each table alone, as trainings of different drafters
    share nothing. With one seed it is the bootstrap over prompts.

    Args:
        statistic: the sums of every table, ``[M]`` or ``[M, R]`` each -> a value, or ``[R]``.
        tables: ``[M, S, P]`` each, with the same prompts in the same order.
        seed: of the draws.
        resamples: R.
        confidence: of the percentile interval.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*(table.sum(axis=(1, 2)) for table in tables)))
    prompts = tables[0].shape[2]
    if prompts < 2:
        return Interval(value, None, None)
    dice = np.random.default_rng(seed)
    drawn = [_draws(dice, table.shape[1], resamples) for table in tables]  # [R, S] each
    of_prompts = _draws(dice, prompts, resamples)  # [R, P]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(
            *(
                np.einsum("msp,rs,rp->mr", table, seeds, of_prompts, optimize=True)
                for table, seeds in zip(tables, drawn, strict=True)
            )
        )
    values = values[np.isfinite(values)]  # a resample of empty answers alone says nothing
    if not values.size:
        return Interval(value, None, None)
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def _draws(dice: np.random.Generator, count: int, resamples: int) -> NDArray[np.float64]:
    """Draw ``[R, count]``: how often each of ``count`` is in a resample."""
    return dice.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


def speedup(base: Sequence[Record], other: Sequence[Record], *, seed: int = 0) -> Interval:
    """Return the speed-up of ``other`` over ``base``: wall time per token, prefill included."""
    pairs = pair(base, other)
    return paired_ratio(
        ([a.times.wall for a, _ in pairs], [len(a.tokens) for a, _ in pairs]),
        ([b.times.wall for _, b in pairs], [len(b.tokens) for _, b in pairs]),
        seed=seed,
    )


def compare(method: Sequence[Record], than: Sequence[Record], *, seed: int = 0) -> Comparison:
    """Compare two methods: one is faster only if the whole interval lies above 1."""
    interval = speedup(than, method, seed=seed)
    return Comparison(method[0].method, than[0].method, interval, interval.above_one)


def fastest_method(
    records: Mapping[str, Sequence[Record]], *, unless_clearly: str | None = None
) -> str:
    """Choose the method with the most tokens a second.

    Args:
        records: method -> its records of the same prompts.
        unless_clearly: is chosen unless another one is clearly faster: a guard against taking what
            was lucky on a few prompts.
    """
    speed = {name: tokens_per_second(of) for name, of in records.items()}
    if (base := unless_clearly) is not None:
        clearly = [name for name in records if compare(records[name], records[base]).faster]
        speed = {name: speed[name] for name in clearly or [base]}
    return max(speed, key=lambda name: speed[name])


def pair(base: Sequence[Record], other: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return the records of the same prompt side by side, in ``base``'s order.

    Raises:
        ValueError: when the two do not hold the same prompts.
    """
    by_prompt = {record.prompt: record for record in other}
    if len(by_prompt) != len(other) or {record.prompt for record in base} != set(by_prompt):
        raise ValueError("the two methods were not measured on the same prompts")
    return [(record, by_prompt[record.prompt]) for record in base]
