"""The paired bootstrap."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from numpy.typing import NDArray

from falcon_lab.measure import statistics
from falcon_lab.measure.records import Answer, Record, RoundColumns, Times
from falcon_lab.measure.statistics import (
    Interval,
    compare,
    fastest_method,
    paired_ratio,
    resampled,
    speedup,
    time_per_token_ratio,
)
from measuring import row


def test_the_ratio_is_that_of_the_total_times_per_token() -> None:
    # (10 + 30) s / 20 tokens = 2 s; (4 + 6) s / 10 tokens = 1 s
    found = paired_ratio(([10.0, 30.0], [10, 10]), ([4.0, 6.0], [4, 6]))
    assert found.ratio == pytest.approx(2.0)


def test_prompts_that_are_hard_for_both_methods_do_not_widen_the_interval() -> None:
    hard = [1.0, 50.0, 3.0, 17.0, 9.0]
    tokens = [10] * 5
    paired = paired_ratio((hard, tokens), ([x / 2 for x in hard], tokens))
    assert paired.low == pytest.approx(2.0)
    assert paired.high == pytest.approx(2.0)
    crossed = paired_ratio((hard, tokens), ([x / 2 for x in reversed(hard)], tokens))
    assert crossed.ratio == pytest.approx(2.0)
    assert crossed.high is not None
    assert crossed.low is not None
    assert crossed.high - crossed.low > 1.0


def test_the_same_seed_gives_the_same_interval() -> None:
    data = (([1.0, 2.0, 4.0], [5, 6, 7]), ([1.0, 1.0, 1.5], [5, 6, 7]))
    assert paired_ratio(*data, seed=3) == paired_ratio(*data, seed=3)
    assert paired_ratio(*data, seed=3, resamples=50) != paired_ratio(*data, seed=4, resamples=50)


def test_the_interval_agrees_with_scipys() -> None:
    dice = np.random.default_rng(1)
    base, other = dice.gamma(5.0, 1.0, 40), dice.gamma(5.0, 0.5, 40)
    tokens = dice.integers(50, 128, (2, 40))
    mine = paired_ratio((list(base), list(tokens[0])), (list(other), list(tokens[1])))
    theirs = scipy.stats.bootstrap(
        (base, tokens[0], other, tokens[1]),
        lambda a, n, b, m, axis: (a.sum(axis) / n.sum(axis)) / (b.sum(axis) / m.sum(axis)),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=10_000,
        random_state=5,
    ).confidence_interval
    assert mine.low == pytest.approx(theirs.low, rel=0.02)
    assert mine.high == pytest.approx(theirs.high, rel=0.02)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(200):
        dice = np.random.default_rng(seed)
        hard = dice.gamma(4.0, 1.0, 40)
        base, other = hard * dice.gamma(20.0, 0.1, 40), hard * dice.gamma(20.0, 0.05, 40)
        tokens = [100] * 40
        found = paired_ratio((list(base), tokens), (list(other), tokens), resamples=1000, seed=seed)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 2.0 <= found.high
    assert 0.89 <= covered / 200 <= 0.99


def test_one_prompt_gives_no_interval() -> None:
    assert paired_ratio(([4.0], [2]), ([1.0], [1])) == Interval(2.0, None, None)
    assert not Interval(2.0, None, None).above_one


@pytest.mark.parametrize(
    ("base", "other"),
    [
        (([], []), ([], [])),
        (([1.0, 2.0], [1, 1]), ([1.0], [1])),
        (([1.0], [0]), ([1.0], [1])),
        (([1.0], [1]), ([1.0], [0])),
    ],
)
def test_figures_that_cannot_be_compared_are_refused(
    base: tuple[list[float], list[int]], other: tuple[list[float], list[int]]
) -> None:
    with pytest.raises(ValueError, match=r"prompts|token|inhomogeneous"):
        paired_ratio(base, other)


def test_a_prompt_with_an_empty_answer_does_not_spoil_the_interval() -> None:
    found = paired_ratio(([1.0, 1.0], [10, 0]), ([0.5, 0.5], [10, 0]))
    assert found.low == pytest.approx(2.0)


def test_faster_than_needs_the_whole_interval_above_one() -> None:
    slow = [row("slow", f"p{i}", tokens=[1] * 10, wall=2.0 + i) for i in range(6)]
    fast = [row("fast", f"p{i}", tokens=[1] * 10, wall=1.0 + i / 2) for i in range(6)]
    assert compare(fast, slow).faster
    assert not compare(slow, fast).faster
    noise = [row("noise", f"p{i}", tokens=[1] * 10, wall=2.0 + 5 - i) for i in range(6)]
    assert not compare(noise, slow).faster
    assert not compare(slow, noise).faster


def test_a_speed_up_is_taken_prompt_by_prompt_whatever_the_order() -> None:
    base = [row("plain", f"p{i}", tokens=[1] * 10, wall=1.0 + i) for i in range(4)]
    other = [row("tree", f"p{i}", tokens=[1] * 10, wall=(1.0 + i) / 4) for i in range(4)]
    found = speedup(base, other[::-1])
    assert (found.low, found.high) == (pytest.approx(4.0), pytest.approx(4.0))


def test_methods_measured_on_different_prompts_are_not_paired() -> None:
    base = [row("plain", "a"), row("plain", "b")]
    with pytest.raises(ValueError, match="not measured on the same prompts"):
        statistics.pair(base, [row("tree", "a"), row("tree", "c")])
    with pytest.raises(ValueError, match="not measured on the same prompts"):
        statistics.pair(base, [row("tree", "a"), row("tree", "b"), row("tree", "b")])


# --- training seeds and prompts ------------------------------------------------------------------


def mean(table: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of the first figure over that of the second."""
    return np.asarray(table[0] / table[1])


def counted(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[S, P]`` values with the number of them: their sums give the mean."""
    return np.stack([values, np.ones_like(values)])


def test_the_spread_of_a_mean_over_seeds_and_prompts_is_the_one_that_theory_gives() -> None:
    dice = np.random.default_rng(0)
    seeds, prompts = 12, 40
    values = dice.normal(0, 1.0, (seeds, 1)) + dice.normal(0, 2.0, (1, prompts))  # no noise
    found = resampled(mean, counted(values), resamples=20_000)
    assert found.low is not None
    assert found.high is not None
    spread = values.mean(1).var() / seeds + values.mean(0).var() / prompts
    width = 2 * scipy.stats.norm.ppf(0.975) * np.sqrt(spread)
    assert found.high - found.low == pytest.approx(width, rel=0.04)
    assert found.ratio == pytest.approx(values.mean())


def test_more_seeds_do_not_make_up_for_few_prompts() -> None:
    prompts = np.random.default_rng(1).normal(0, 1.0, (1, 10))
    one = resampled(mean, counted(prompts))
    many = resampled(mean, counted(np.repeat(prompts, 50, axis=0)))
    assert width_of(many) == pytest.approx(width_of(one), rel=0.05)


def test_more_prompts_do_not_make_up_for_few_seeds() -> None:
    seeds = np.random.default_rng(2).normal(0, 1.0, (4, 1))
    few = resampled(mean, counted(np.repeat(seeds, 5, axis=1)))
    many = resampled(mean, counted(np.repeat(seeds, 500, axis=1)))
    assert width_of(few) > 0.3
    assert width_of(many) == pytest.approx(width_of(few), rel=0.05)


def test_the_interval_over_seeds_and_prompts_covers_the_truth() -> None:
    covered = 0
    for seed in range(200):
        dice = np.random.default_rng(seed)
        effects = dice.normal(0, 0.5, (8, 1)) + dice.normal(0, 1.0, (1, 24))
        values = 3.0 + effects + dice.normal(0, 0.5, (8, 24))
        found = resampled(mean, counted(values), resamples=1000, seed=seed)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 3.0 <= found.high
    assert 0.87 <= covered / 200 <= 0.99


def test_what_makes_a_prompt_hard_for_every_seed_of_both_sides_cancels() -> None:
    hard = np.array([1.0, 50.0, 3.0, 17.0])
    tokens = np.full(4, 10.0)
    base = np.stack([hard, tokens])[:, None]  # [2, 1, P]
    other = np.stack([np.stack([hard / 2, hard / 2]), np.stack([tokens, tokens])])  # [2, 2, P]
    found = resampled(time_per_token_ratio, base, other)
    assert (found.ratio, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_seed_is_the_bootstrap_over_prompts() -> None:
    base, other = ([1.0, 2.0, 4.0], [5, 6, 7]), ([1.0, 1.0, 1.5], [5, 6, 7])
    tables = [np.array(side, dtype=np.float64)[:, None] for side in (base, other)]
    assert resampled(time_per_token_ratio, *tables) == paired_ratio(base, other)


def test_a_statistic_that_no_resample_can_tell_has_no_interval() -> None:
    nothing = counted(np.zeros((2, 3)))
    found = resampled(lambda table: table[1] / table[0], nothing)
    assert (found.low, found.high) == (None, None)


def width_of(found: Interval) -> float:
    assert found.low is not None
    assert found.high is not None
    return found.high - found.low


def answering(name: str, seconds: list[float]) -> list[Record]:
    def turn(wall: float) -> Answer:
        return Answer(3, [1, 2], "", "length", Times(wall), RoundColumns())

    return [Record(name, str(n), "", [turn(s)], [s]) for n, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ([0.5, 0.4, 0.5, 0.6], "other"),  # faster on every prompt
        ([0.1, 1.3, 0.9, 1.2], "tuned"),  # faster by chance
        ([2.0, 2.0, 2.0, 2.0], "tuned"),
    ],
)
def test_a_method_may_be_chosen_unless_another_is_clearly_faster(
    other: list[float], expected: str
) -> None:
    records = {"tuned": answering("tuned", [1.0] * 4), "other": answering("other", other)}
    assert fastest_method(records, unless_clearly="tuned") == expected


def test_the_fastest_method_has_the_most_tokens_a_second() -> None:
    records = {"slow": answering("slow", [1.0, 2.0]), "fast": answering("fast", [2.0, 0.5])}
    assert fastest_method(records) == "fast"
