"""Agreement with plain decoding; ``test_benchmark.py`` shows it inside a measurement."""

from __future__ import annotations

import pytest

from falcon_lab.measure.metrics import first_difference, held_against
from measuring import prompt, row


def test_without_logits_a_difference_has_no_margin() -> None:
    plain, other = row("plain", tokens=[1, 2, 3]), row("tree", tokens=[1, 2, 4])
    held = held_against(plain, other, prompt("p0", "a"), None)
    assert (held.identical, held.difference_turn, held.difference_position) == (False, 0, 2)
    assert held.margin is None
    assert held_against(plain, row("tree", tokens=[1, 2, 3]), prompt("p0", "a"), None).identical


@pytest.mark.parametrize(
    ("expected", "got", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([], [], None)],
)
def test_the_first_difference(expected: list[int], got: list[int], place: int | None) -> None:
    assert first_difference(expected, got) == place
