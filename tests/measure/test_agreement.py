"""Agreement with plain decoding; ``test_measurement.py`` shows it inside a measurement."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from falcon_lab.decoding.rounding import Reading
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.metrics import compare_with_plain, first_difference, summarise
from falcon_lab.measure.records import Record
from measuring import prompt, row


def test_without_logits_a_difference_has_no_margin() -> None:
    plain, other = row("plain", tokens=[1, 2, 3]), row("tree", tokens=[1, 2, 4])
    found = compare_with_plain(plain, other, prompt("p0", "a"), None)
    assert (found.identical, found.difference_turn, found.difference_position) == (False, 0, 2)
    assert found.margin is None
    assert compare_with_plain(
        plain, row("tree", tokens=[1, 2, 3]), prompt("p0", "a"), None
    ).identical


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_the_first_difference(expected: list[int], got: list[int], place: int | None) -> None:
    assert first_difference(expected, got) == place


def agreement(margin: float, noise: float | None) -> Record:
    plain, other = row("plain", tokens=[1, 2, 3]), row("tree", tokens=[1, 2, 0])
    return compare_with_plain(
        plain,
        other,
        prompt("p0", "a"),
        lambda *_: Reading(torch.tensor([0.0, -9.0, -9.0, margin]).expand(4, -1), noise),
    )


def test_a_difference_that_was_read_is_not_read_again(tmp_path: Path) -> None:
    journal, reads = Journal(tmp_path / "answers.jsonl"), list[int]()

    def read(*_: object) -> Reading:
        reads.append(1)
        return Reading(torch.tensor([0.0, -9.0, -9.0, 0.25]).expand(4, -1), 0.5)

    plain = row("plain", tokens=[1, 2, 3])
    others = [row("tree", tokens=tokens) for tokens in ([1, 2, 0], [1, 2, 0, 1], [1, 2])]
    first = [compare_with_plain(plain, o, prompt("p0", "a"), read, journal) for o in others]
    assert len(reads) == 2  # the first two part at the same token
    again = Journal(journal.path)
    assert [compare_with_plain(plain, o, prompt("p0", "a"), read, again) for o in others] == first
    compare_with_plain(plain, others[0], prompt("p0", "b"), read, again)
    assert len(reads) == 3


@pytest.mark.parametrize(
    ("margin", "noise", "tie"),
    [(0.1, 0.125, True), (0.125, 0.125, True), (0.3, 0.125, False), (0.0, None, False)],
)
def test_a_text_parts_at_a_tie_where_rounding_moves_the_margin_as_far(
    margin: float, noise: float | None, tie: bool
) -> None:
    found = agreement(margin, noise)
    assert found.identical is False
    assert found.margin == pytest.approx(margin)
    assert found.noise == noise
    assert summarise([found], None, lossless=True).ties == tie
