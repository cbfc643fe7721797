from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.trees.merging import Claim
from falcon_lab.trees.part_odds import PartOdds


def claim(part: int, probability: float = 1.0) -> Claim:
    return Claim(part, 1, math.log(probability), -1)


def test_most_of_every_claim_is_assumed_before_anything_was_seen() -> None:
    odds = PartOdds(2)
    assert odds.chance([claim(0)], 1) == pytest.approx(0.8)
    assert odds.chance([claim(1, 0.3)], 4) == pytest.approx(0.24)
    assert odds.chance([claim(0), claim(1)], 1) == pytest.approx(0.96)


def test_what_was_looked_up_is_no_claim() -> None:
    odds = PartOdds(2)
    odds.looks_up(1)
    first, later = (odds.chance([claim(1)], depth) for depth in (1, 2))
    assert first < later < odds.chance([claim(0)], 1)
    for _ in range(500):
        odds.add([claim(1)], 1, accepted=True)
    assert odds.chance([claim(1)], 1) > 0.98


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_what_was_seen_takes_the_place_of_what_was_assumed(share: float) -> None:
    odds = PartOdds(2)
    for number in range(1000):
        odds.add([claim(0)], 1, accepted=number % 10 < 10 * share)
    assert odds.chance([claim(0)], 1) == pytest.approx(share, abs=0.01)
    assert odds.chance([claim(0, 0.4)], 5) == pytest.approx(0.4 * share, abs=0.01)
    assert odds.chance([claim(1)], 1) == pytest.approx(0.8)


def test_a_claim_of_nothing_has_no_chance() -> None:
    assert PartOdds(1).chance([Claim(0, 1, -math.inf, -1)], 1) == 0


def test_deep_nodes_of_a_long_copy_have_a_chance_of_their_own() -> None:
    odds = PartOdds(1)
    for number in range(400):
        odds.add([claim(0)], 1, accepted=number % 4 == 0)
        odds.add([claim(0)], 4, accepted=number % 4 > 0)
    assert odds.chance([claim(0)], 1) < 0.3
    assert odds.chance([claim(0)], 7) > 0.7


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=60), st.integers(0, 40))
def test_shares_are_all_of_the_nodes_and_nobodys_is_nothing(
    seen: list[tuple[int, bool]], nodes: int
) -> None:
    odds = PartOdds(3)
    for part, accepted in seen:
        odds.add([claim(part)], 1, accepted=accepted)
        odds.end_round()
    shares = odds.shares(nodes)
    assert sum(shares) == nodes
    assert min(shares) >= min(1, nodes // 3)


def test_the_part_of_which_more_was_accepted_has_the_larger_share() -> None:
    odds = PartOdds(2)
    for _ in range(20):
        odds.add([claim(1)], 1, accepted=True)
        odds.end_round()
    first, second = odds.shares(20)
    assert second > 3 * first
