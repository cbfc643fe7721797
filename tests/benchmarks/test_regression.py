"""Two checkouts take turns, and must write the same."""

from __future__ import annotations

from typing import Any

import pytest

import regression
from running import ROOT


class Scripted:
    """A checkout that takes as long as it is said to."""

    def __init__(self, seconds: float, text: list[int], log: list[float]) -> None:
        self.seconds, self.text, self.log = seconds, text, log

    def run(self, way: str, prompt: int) -> dict[str, Any]:
        self.log.append(self.seconds)
        return {"wall": self.seconds, "cpu": self.seconds / 2, "texts": [self.text]}


def test_the_ratio_is_above_one_where_the_new_checkout_is_faster_and_both_begin_as_often() -> None:
    log: list[float] = []
    old, new = Scripted(3.0, [1, 2], log), Scripted(2.0, [1, 2], log)
    ratios = regression.compare(old, new, "plain", repeats=2)  # type: ignore[arg-type]
    turns = 2 * len(regression.PROMPTS)
    assert ratios == {"wall": [1.5] * turns, "cpu": [1.5] * turns}
    assert log[::2].count(3.0) == log[::2].count(2.0) == turns // 2


def test_texts_that_differ_are_an_error() -> None:
    old, new = Scripted(1.0, [1, 2], []), Scripted(1.0, [1, 3], [])
    with pytest.raises(SystemExit, match="tree, prompt 0: the texts differ"):
        regression.compare(old, new, "tree", repeats=1)  # type: ignore[arg-type]


def test_the_interval_holds_the_median() -> None:
    middle, low, high = regression.interval([0.9, 1.0, 1.0, 1.1, 1.3], seed=0)
    assert middle == 1.0
    assert 0.9 <= low <= middle <= high <= 1.3


@pytest.mark.parametrize("name", regression.MOVED)
def test_everything_that_has_moved_is_found_in_this_checkout(name: str) -> None:
    assert regression.HERE == ROOT
    assert regression.find(name).__name__ == name
