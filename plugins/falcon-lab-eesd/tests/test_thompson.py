from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from eesd_cases import drafter, engine, target
from falcon_lab_eesd import BetaConfig, CalibrationConfig
from falcon_lab_eesd.thompson import BetaTs, CalibrationTs

from falcon_lab import fields
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundOutcome
from falcon_lab.testing import lossless_rounds, write

STREAM = [(4, 4), (4, 0), (3, 2), (0, 0), (1, 1), (6, 5)]
"""Draft tokens of a round, and those of them that were accepted."""


def beta(**options: Any) -> BetaTs:
    return BetaTs(BetaConfig(**options), BuildContext(target("llama")))


def calibration(**options: Any) -> CalibrationTs:
    return CalibrationTs(CalibrationConfig(**options), BuildContext(target("llama")))


def sure(probability: float) -> DraftOutput:
    """Return a pass whose likeliest token has that probability, of three."""
    rest = (1 - probability) / 2
    return DraftOutput(torch.tensor([[[probability, rest, rest]]]).log())


def outcome(drafted: int, accepted: int) -> RoundOutcome:
    return RoundOutcome(drafted, drafted, accepted)


def test_the_posterior_counts_accepted_tokens_and_rounds_that_refused_one() -> None:
    one, nothing = beta(accepted=2.0, refused=0.5), sure(0.9)
    found = []
    for drafted, accepted in STREAM:
        one.update(outcome(drafted, accepted))
        found.append(one.posterior(nothing))
    assert found == [(6, 0.5), (6, 1.5), (8, 2.5), (8, 2.5), (9, 2.5), (14, 3.5)]
    one.reset()
    assert one.posterior(nothing) == (2, 0.5)


def test_the_drafters_probability_adds_tokens_to_the_posterior_of_a_draw() -> None:
    one = calibration(weight=4.0)
    one.update(outcome(3, 2))
    assert one.posterior(sure(0.75)) == pytest.approx((3 + 3, 2 + 1))
    assert one.posterior(sure(0.4)) == pytest.approx((3 + 1.6, 2 + 2.4))
    assert (one.accepted, one.refused) == (3, 2)
    assert calibration(weight=0.0).posterior(sure(0.75)) == (1, 1)


def test_a_temperature_calibrates_it() -> None:
    one, colder = calibration(temperature=2.0), calibration(temperature=0.5)
    square = [math.sqrt(each) for each in (0.64, 0.18, 0.18)]
    expected = square[0] / sum(square)
    assert one.posterior(sure(0.64)) == pytest.approx((1 + 4 * expected, 5 - 4 * expected))
    assert colder.posterior(sure(0.64))[0] > calibration().posterior(sure(0.64))[0]


@pytest.mark.parametrize("make", [beta, calibration])
def test_decisions_are_those_of_the_seeded_draws(make: Any) -> None:
    one, expected, found, draws = make(seed=7), [], [], Random(7)
    for drafted, accepted in STREAM * 4:
        for probability in (0.9, 0.5):
            a, b = one.posterior(sure(probability))
            expected.append(draws.betavariate(a, b) > draws.random())
            found.append(one.keep_going(1, sure(probability)))
        one.update(outcome(drafted, accepted))
    assert found == expected
    assert {True, False} == set(found)
    assert found != [make(seed=8).keep_going(1, sure(0.9)) for _ in found]


def test_every_text_begins_with_the_same_draws() -> None:
    one = beta(seed=3)
    texts = []
    for _ in range(2):
        one.reset()
        texts.append([one.keep_going(1, sure(0.5)) for _ in range(30)])
    assert texts[0] == texts[1]


def test_much_is_drafted_where_all_was_accepted_and_little_where_nothing_was() -> None:
    eager, shy = beta(), beta()
    for _ in range(50):
        eager.update(outcome(4, 4))
        shy.update(outcome(4, 0))
    passes = [sum(one.keep_going(1, sure(0.5)) for _ in range(100)) for one in (eager, shy)]
    assert passes[0] > 95
    assert passes[1] < 5


def test_the_depth_is_limited() -> None:
    assert beta(most=5).budget() == Budget(depth=5)
    assert beta(most=None).budget() == Budget()


@pytest.mark.parametrize("name", ["beta_ts", "calibration_ts"])
def test_text_with_them_is_the_targets_own_and_of_many_lengths(name: str) -> None:
    tree = {"name": "chain", "depth": 8}
    controlled = engine("llama", drafter(stir=0.0), tree, {"name": name, "most": 5})
    rounds = lossless_rounds(controlled, [[5, 3, 2]], 40)
    assert max(one.depth for one in rounds) <= 5
    assert len({one.depth for one in rounds}) > 2
    again = write(controlled, [5, 3, 2], 40)
    assert [one.depth for one in again.rounds] == [one.depth for one in rounds]


@pytest.mark.parametrize("options", [{"most": 0}, {"accepted": 0.0}, {"refused": -1.0}])
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        fields.options(BetaConfig, options, "controller")
    with pytest.raises(ConfigError, match="temperature"):
        fields.options(CalibrationConfig, {"temperature": 0.0}, "controller")
