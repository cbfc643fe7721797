"""Figures over seeds and prompts, on rows whose figures are known."""

from __future__ import annotations

import pytest

from comparisons import measured
from falcon_lab.measure.records import tokens_per_second
from falcon_lab.studies.compare import figures
from falcon_lab.studies.compare.measuring import merged
from measuring import row


def test_times_are_taken_over_all_seeds_and_tokens_before_they_are_divided() -> None:
    fast, slow = figures.rows(measured())
    # plain: 12 s for 2 x 7 tokens; fast: 3 s for 2 x 8, and 6 s for 2 x 7
    assert fast["speedup"]["ratio"] == pytest.approx((12 / 14) / (9 / 30))
    assert slow["speedup"]["ratio"] == pytest.approx(1.0)
    assert fast["round_steps"] == pytest.approx((9 / 14) / (12 / 14))
    assert fast["by_seed"][0]["speedup"] == pytest.approx((12 / 14) / (3 / 16))
    assert fast["by_seed"][1]["speedup"] == pytest.approx((12 / 14) / (6 / 14))


def test_acceptance_is_counted_both_ways() -> None:
    fast, _ = figures.rows(measured())
    # of both seeds: 7 rounds a prompt accept 6 tokens and emit 13
    assert fast["tau"] == pytest.approx(13 / 7)
    assert fast["tau_draft"] == pytest.approx(6 / 7)
    assert fast["alpha"] == pytest.approx(6 / 13)
    assert fast["intervals"]["tau"]["ratio"] == pytest.approx(13 / 7)
    assert fast["by_seed"][0]["tau"] == pytest.approx(7 / 3)
    assert fast["by_seed"][1]["alpha"] == pytest.approx(2 / 6)


def test_a_seed_that_is_slower_widens_the_interval_and_equal_prompts_do_not() -> None:
    fast, slow = figures.rows(measured())
    assert fast["speedup"]["low"] == pytest.approx(fast["by_seed"][1]["speedup"])
    assert fast["speedup"]["high"] == pytest.approx(fast["by_seed"][0]["speedup"])
    assert slow["speedup"]["low"] == pytest.approx(slow["speedup"]["high"])


def test_what_else_is_known_of_a_row_is_in_it() -> None:
    fast, _ = figures.rows(measured())
    assert (fast["head"], fast["budget"], fast["temperature"]) == ("fast", "chain-2", 0.0)
    assert (fast["seeds"], fast["prompts"], fast["lossless"]) == ([0, 1], 2, True)
    assert fast["peak_bytes"] == 2**20
    assert fast["time_split"]["verify"] == pytest.approx(60)
    assert fast["identical_share"] == 1


def test_every_two_heads_are_held_against_each_other_the_faster_one_first() -> None:
    [pair] = figures.pairs(measured())
    assert (pair["head"], pair["than"], pair["budget"]) == ("fast", "slow", "chain-2")
    assert pair["speedup"]["ratio"] == pytest.approx((12 / 14) / (9 / 30))
    assert pair["faster"]


def test_plain_decoding_counts_with_the_turn_whose_time_is_the_median() -> None:
    turns = [[row("x", "p0", wall=wall, tokens=[1])] for wall in (3.0, 1.0, 2.0)]
    [plain] = merged(turns)
    assert (plain.method, plain.times.wall) == ("plain", 2.0)
    assert plain.wall_repeats == [3.0, 1.0, 2.0]


def test_a_rate_is_that_of_all_prompts_together() -> None:
    both = [row("x", wall=1.0, tokens=[1] * 3), row("x", wall=3.0, tokens=[1] * 5)]
    assert tokens_per_second(both) == pytest.approx(2.0)
