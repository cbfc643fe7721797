from __future__ import annotations

from random import Random
from typing import Any

import pytest

from everything import everything
from falcon_lab.errors import FalconLabError
from falcon_lab.studies.search.space import (
    Choices,
    Interval,
    Subset,
    beside,
    draw,
    merged,
    parse_space,
    present,
)

NODES: dict[str, dict[str, Any]] = {
    "drafter": {"name": "selfspec", "skip_mlp": [3, 1]},
    "tree": {"name": "chain", "depth": 4},
    "acceptance": {"name": "auto"},
    "controller": {"name": "confidence", "threshold": 0.3},
}
OVER = (
    "drafter.skip_mlp=1..6",
    "controller.threshold=0.1..0.9",
    "tree.depth=2..8",
    "tree.proposal=deterministic,sampled",
)


def test_the_type_of_an_option_says_what_is_searched() -> None:
    assert parse_space(OVER, NODES, everything()) == {
        "drafter.skip_mlp": Subset(1, 6),
        "controller.threshold": Interval(0.1, 0.9, whole=False),
        "tree.depth": Interval(2, 8, whole=True),
        "tree.proposal": Choices(("deterministic", "sampled")),
    }


def test_points_are_within_and_beside_each_other() -> None:
    space, random = parse_space(OVER, NODES, everything()), Random(1)
    complete = {section: dict(node) for section, node in NODES.items()}
    complete["tree"]["proposal"] = "sampled"
    point = present(space, complete)
    assert point is not None
    for _ in range(50):
        assert all(dimension.holds(point[key]) for key, dimension in space.items())
        other = beside(space, point, random)
        assert sum(other[key] != point[key] for key in space) <= 1
        assert len({*other["drafter.skip_mlp"]} ^ {*point["drafter.skip_mlp"]}) <= 1
        point = draw(space, random)
        nodes = merged(NODES, point, everything())
        assert nodes["drafter"]["skip_mlp"] == point["drafter.skip_mlp"]
        assert nodes["tree"]["depth"] == point["tree.depth"]


def test_a_method_that_is_outside_is_no_point() -> None:
    space = parse_space(["drafter.skip_attention=0..3"], NODES, everything())
    assert present(space, NODES) is None


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ([], "name what is searched"),
        (["tree.depth"], "--over tree.depth: write KEY=LOW..HIGH"),
        (["tree.depth=2..3", "tree.depth=1..2"], "--over tree.depth: is given twice"),
        (["width=1..2"], "begin with one of drafter, tree"),
        (["tree.dept=1..2"], "no option of chain; did you mean 'depth'"),
        (["acceptance.x=1..2"], "no option of auto"),
        (["tree.depth=3"], "leaves nothing to choose"),
        (["tree.depth=1.5..3"], "must be two whole numbers"),
        (["tree.depth=5..3"], "the lower one first"),
        (["controller.threshold=a..b"], "must be two numbers"),
        (["controller.threshold=.."], "must be two numbers"),
        (["controller.threshold=[..1"], "cannot be read"),
        (["drafter.skip_mlp=0..99999999"], "more than 10,000"),
    ],
)
def test_what_is_no_space_is_refused_by_its_key(over: list[str], said: str) -> None:
    with pytest.raises(FalconLabError, match=said.replace(".", r"\.")):
        parse_space(over, NODES, everything())
