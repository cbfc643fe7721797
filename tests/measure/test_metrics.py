"""Metrics, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.measure import metrics
from falcon_lab.measure.metrics import DEFINITIONS, MethodSummary, acceptance, summarise
from falcon_lab.measure.records import RoundColumns, Times
from falcon_lab.report.methods import NAMES
from measuring import measurement, row


def test_layers_are_counted_per_token_of_the_rounds() -> None:
    columns = RoundColumns([2, 2], [2, 2], [2, 2], [2, 0], [3, 1], [40.0, 20.0])
    made = row("a", wall=1.0, accepted=[2, 0])
    turn = replace(made.turns[0], rounds=columns)
    found = summarise([replace(made, turns=[turn])], None, lossless=True)
    assert found.layers_per_token == 15
    assert summarise([made], None, lossless=True).layers_per_token is None


def test_a_small_case_worked_out_by_hand() -> None:
    # Four rounds accept 0, 1, 3 and 3 of 3: 7 accepted, 11 emitted, 12 new tokens.
    rows = [
        row("tree", "a", wall=2.0, accepted=[0, 1], depth=3),
        row("tree", "b", wall=1.0, accepted=[3, 3], depth=3),
    ]
    plain = [row("plain", "a", tokens=[1] * 4, wall=4.0), row("plain", "b", tokens=[1] * 9, wall=9)]
    s = summarise(rows, plain, lossless=True)
    assert s.new_tokens == 4 + 9
    assert s.wall == 3.0
    assert s.tokens_per_second == pytest.approx(13 / 3)
    assert s.decode_tokens_per_second == pytest.approx(11 / 2.7)
    assert s.speedup is not None
    assert s.speedup.ratio == pytest.approx((13 / 13) / (3 / 13))
    assert s.tau == 11 / 4
    assert s.tau_draft == 7 / 4
    assert s.alpha == 7 / 11
    assert s.acceptance == [3 / 4, 2 / 4, 2 / 4]
    assert s.acceptance_conditional == [3 / 4, 2 / 3, 2 / 2]
    assert s.accepted_histogram == [1, 1, 0, 2]
    assert s.nodes_per_round == 6
    assert s.passes_per_round == 1
    assert s.rounds == 4


def test_conditional_acceptance_counts_only_rounds_that_drafted_so_far() -> None:
    rounds = RoundColumns(
        nodes=[1, 4, 4], depth=[1, 4, 4], passes=[1, 1, 1], accepted=[1, 2, 0], emitted=[2, 3, 1]
    )
    unconditional, conditional = acceptance(rounds)
    assert unconditional == [2 / 3, 1 / 3, 0.0, 0.0]
    # Position 2: the first round accepted position 1 but drafted no second token.
    assert conditional == [2 / 3, 1 / 1, 0.0, None]


def test_a_cut_last_round_lowers_tau_but_not_its_definition() -> None:
    full = row("chain", accepted=[2, 2])
    cut = replace(
        full,
        turns=[
            replace(
                full.turns[0],
                rounds=RoundColumns([4, 4], [4, 4], [2, 2], accepted=[2, 1], emitted=[3, 1]),
            )
        ],
    )
    s = summarise([cut], None, lossless=True)
    assert (s.tau, s.tau_draft) == (4 / 2, 3 / 2)


def test_a_method_that_drafts_nothing_has_no_drafting_figures() -> None:
    s = summarise([row("plain", accepted=[0, 0, 0], depth=0)], None, lossless=True)
    assert s.tau is s.tau_draft is s.alpha is s.nodes_per_round is s.passes_per_round is None
    assert s.acceptance == s.accepted_histogram == []
    assert s.decode_tokens_per_second == pytest.approx(3 / 0.9)
    assert s.speedup is None


def test_a_method_that_cannot_be_looked_into_has_its_wall_time_alone() -> None:
    [one, *_] = measurement(2).records["HF generate"]
    s = summarise([one], None, lossless=True)
    assert s.time_split is None
    assert s.decode_tokens_per_second is None
    assert s.milliseconds_per_token == {"other": pytest.approx(1600 / 128)}


def test_the_parts_of_a_tokens_time_sum_to_its_wall_time() -> None:
    s = summarise([row("tree", wall=2.0, accepted=[1, 2, 0])], None, lossless=True)
    assert sum(s.milliseconds_per_token.values()) == pytest.approx(2000 / s.new_tokens)
    assert s.milliseconds_per_token["other"] == pytest.approx(0.05 * 2000 / s.new_tokens)
    assert s.time_split is not None
    assert s.time_split.accept_commit == pytest.approx(10)


@given(st.lists(st.floats(0, 100), min_size=5, max_size=5).filter(lambda parts: sum(parts) > 1e-3))
def test_a_time_split_sums_to_a_hundred(parts: list[float]) -> None:
    split = metrics.time_split(Times(sum(parts), 0.0, sum(parts), *parts))
    assert split is not None
    assert split.draft + split.verify + split.accept_commit + split.overhead == pytest.approx(100)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_the_metrics_of_uncut_rounds_agree_with_each_other(accepted: list[int]) -> None:
    s = summarise([row("chain", accepted=accepted, depth=5)], None, lossless=True)
    assert s.tau is not None
    assert s.tau_draft is not None
    assert s.alpha is not None
    assert s.tau == pytest.approx(1 + s.tau_draft)
    assert s.alpha == pytest.approx(s.tau_draft / (s.tau_draft + 1))
    assert sum(s.acceptance) == pytest.approx(s.tau_draft)
    assert s.acceptance == sorted(s.acceptance, reverse=True)
    product = 1.0
    for whole, conditional in zip(s.acceptance, s.acceptance_conditional, strict=True):
        product *= conditional or 0.0
        assert whole == pytest.approx(product)


def test_agreement_with_plain_decoding_is_counted_in_prompts_and_tokens() -> None:
    rows = [
        row("tree", "a", tokens=[1] * 30, identical=True),
        row("tree", "b", tokens=[1] * 30, identical=False, difference=9, margin=-0.25),
        row("tree", "c", tokens=[1] * 30, identical=False, difference=19, margin=0.125),
        row("tree", "d", tokens=[1] * 30, identical=True),
    ]
    s = summarise(rows, None, lossless=True)
    assert s.identical_share == 0.5
    assert s.divergence_rate == pytest.approx(2 / (30 + 10 + 20 + 30))
    assert s.largest_margin == 0.25


def test_tokens_of_earlier_turns_were_compared_too() -> None:
    first = row("tree", tokens=[1] * 30).turns
    two = row("tree", tokens=[1] * 30, identical=False, difference=4)
    two = replace(two, turns=first + two.turns, difference_turn=1)
    assert summarise([two], None, lossless=True).divergence_rate == 1 / 35


def test_sampling_is_not_held_against_plain_decoding() -> None:
    s = summarise([row("tree", identical=None)], None, lossless=True)
    assert s.identical_share is s.divergence_rate is s.largest_margin is None


def test_repeats_that_disagree_show_in_the_summary() -> None:
    rows = [row("tree", "a"), replace(row("tree", "b"), repeats_agree=False)]
    assert not summarise(rows, None, lossless=True).repeats_agree


def test_every_pair_of_methods_is_compared_the_faster_first() -> None:
    found = metrics.comparisons(measurement(6).records)
    assert [(c.method, c.than) for c in found] == [
        ("tree", "chain"),
        ("tree", "plain"),
        ("tree", "HF generate"),
        ("chain", "plain"),
        ("chain", "HF generate"),
        ("plain", "HF generate"),
    ]
    assert all(c.speedup.ratio > 1 for c in found)


def test_every_defined_metric_is_in_the_summary_and_has_a_name_in_the_report() -> None:
    assert set(DEFINITIONS) <= {field.name for field in fields(MethodSummary)}
    assert set(NAMES) == set(DEFINITIONS)


def test_an_answer_without_a_token_has_no_speed_up_and_divides_by_nothing() -> None:
    s = summarise([row("tree", tokens=[])], [row("plain", tokens=[1])], lossless=True)
    assert s.speedup is None
    assert s.tokens_per_second == 0
    assert s.milliseconds_per_token == {}
