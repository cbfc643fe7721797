"""Rows of raw figures."""

from __future__ import annotations

import json
from dataclasses import replace

from falcon_lab.measure.records import Record, RoundColumns, Times
from measuring import measurement, row


def test_a_row_survives_the_way_through_json() -> None:
    for rows in measurement(2, diverging=True).records.values():
        for one in rows:
            assert Record.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_what_can_be_computed_is_written_out_too() -> None:
    written = row("tree", tokens=[5, 5, 6, 5], accepted=[0, 2, 2]).as_dict()
    assert written["new_tokens"] == 4
    assert written["distinct"] == 0.5
    assert written["finish"] == "length"
    assert written["accepted_histogram"] == [1, 0, 2]


def test_turns_add_up() -> None:
    one = row("tree", tokens=[1, 2], wall=1.0, accepted=[1, 0])
    both = replace(one, turns=[*one.turns, *row("tree", tokens=[3], wall=2.0, accepted=[4]).turns])
    assert both.tokens == [1, 2, 3]
    assert both.rounds.accepted == [1, 0, 4]
    assert both.times.wall == 3.0
    assert both.times.verify == (0.6 * 0.9) * 3.0


def test_times_that_nobody_measured_stay_unknown_in_a_sum() -> None:
    total = Times(1.0, prefill=0.5) + Times(2.0)
    assert total == Times(3.0)


def test_an_empty_answer_does_not_count_as_looping() -> None:
    assert row("plain", tokens=[]).distinct == 1.0
    assert row("plain", tokens=[]).accepted_histogram == []
    assert len(RoundColumns()) == 0
