"""Agreement with plain decoding; ``test_measurement.py`` shows it inside a measurement."""

from __future__ import annotations

import pytest

from falcon_lab.measure.metrics import compare_with_plain, first_difference
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
