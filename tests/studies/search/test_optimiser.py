from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.studies.search.optimiser import Optimiser, check_installed
from falcon_lab.studies.search.scoring import Attempt
from falcon_lab.studies.search.space import Choices, Interval, Point, Space, Subset
from falcon_lab.studies.search.stage import Journal, Plan, attempts

SPACE: Space = {
    "drafter.skip": Subset(0, 5),
    "controller.threshold": Interval(0.0, 1.0, whole=False),
    "tree.depth": Interval(1, 9, whole=True),
    "tree.kind": Choices(("a", "b")),
}


def worth(point: Point) -> float:
    """Best for {1, 4}, 0.5, 3 and b."""
    apart = len({*point["drafter.skip"]} ^ {1, 4}) / 6 + abs(point["tree.depth"] - 3) / 8
    return 5.0 - apart - abs(point["controller.threshold"] - 0.5) - (point["tree.kind"] == "a")


def optimiser(sampler: str = "tpe", **more: Any) -> Optimiser:
    pytest.importorskip("optuna")
    return Optimiser(SPACE, sampler=sampler, seed=3, exact=True, **more)


def play(one: Optimiser, count: int) -> list[tuple[Point, float]]:
    found = []
    for _ in range(count):
        point = one.ask()
        found.append((point, worth(point)))
        one.tell(*found[-1])
    return found


@pytest.mark.parametrize(("sampler", "known"), [("tpe", 17), ("gp", 11)])
def test_it_proposes_the_same_however_often_it_was_interrupted(sampler: str, known: int) -> None:
    whole, again = play(optimiser(sampler), known + 2), optimiser(sampler)
    for point, score in whole[:known]:
        again.tell(point, score)
    assert play(again, 2) == whole[known:]


def test_it_begins_where_the_method_is_and_gets_better() -> None:
    first = {"drafter.skip": [], "controller.threshold": 0.0, "tree.depth": 9, "tree.kind": "a"}
    found = play(optimiser(first=first), 40)
    assert found[0][0] == first
    assert max(score for _, score in found[20:]) > max(score for _, score in found[:10])


def test_a_point_that_it_has_not_proposed_is_learnt_from_too() -> None:
    one = optimiser()
    play(one, 12)
    one.ask()
    one.tell({**one.ask(), "drafter.skip": [0, 1, 2, 3, 4, 5]}, 0.0)
    assert set(one.ask()) == set(SPACE)


def test_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FalconLabError, match="pip install optuna"):
        check_installed()


# --- attempts -----------------------------------------------------------------------------------

PLAN = Plan("mine", ("drafter.skip=0..5",), objective="cost", attempts=14)


def attempt(point: Point) -> Attempt:
    return Attempt(point, worth(point), tokens=3, rounds=2)


def test_a_search_goes_on_from_its_file_and_tries_nothing_twice(tmp_path: Path) -> None:
    path, facts = tmp_path / "search.jsonl", {"seed": 3}
    whole = Journal(tmp_path / "whole.jsonl", facts)
    list(attempts(whole, optimiser(), attempt, SPACE, PLAN, 3))
    tried = [repr(one.point) for one in whole.attempts]
    assert len(set(tried)) == len(tried) == 14

    steps = attempts(Journal(path, facts), optimiser(), attempt, SPACE, PLAN, 3)
    for _ in range(12):
        next(steps)
    steps.close()
    with path.open("a") as file:
        file.write('{"point": {"drafter.sk')  # a kill
    again, one = Journal(path, facts), optimiser()
    for known in again.attempts:
        one.tell(known.point, known.score)
    assert len(list(attempts(again, one, attempt, SPACE, PLAN, 3))) == 2
    assert again.attempts == Journal(path, facts).attempts == whole.attempts
    assert again.best.score == max(one.score for one in again.attempts)


def test_another_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.jsonl"
    Journal(path, {"seed": 3, "texts": 4})
    for facts in ({"seed": 3, "texts": 5}, {"texts": 4}):
        if facts == {"texts": 4}:
            path.write_text("not ours\n")
        with pytest.raises(FalconLabError, match=r"another search \(texts\)"):
            Journal(path, facts)
