"""Is the order of a paper's table that of ours?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from comparisons import measured, results
from falcon_lab.errors import ConfigError
from falcon_lab.measure.statistics import Interval
from falcon_lab.studies.compare.paper import check_paper, compare_with_published
from falcon_lab.studies.compare.plan import ComparisonConfig, PaperConfig
from falcon_lab.studies.compare.report import format_comparison, render
from running import refused

OURS = {"a": 3.0, "b": 2.0, "c": 1.0}


def ours(metric: str, head: str, budget: str) -> Mapping[str, Any] | None:
    return {"ratio": OURS[head], "low": None, "high": None} if head in OURS else None


def ratio(metric: str, first: tuple[str, str], second: tuple[str, str]) -> Interval | None:
    """Clear for a against the others, not clear for b against c."""
    if first[0] not in OURS or second[0] not in OURS:
        return None
    value = OURS[first[0]] / OURS[second[0]]
    wide = 3.0 if {first[0], second[0]} == {"b", "c"} else 1.1
    return Interval(value, value / wide, value * wide)


def verdicts(*columns: dict[str, float]) -> tuple[dict[str, str], str]:
    paper = PaperConfig(published={"speedup": {str(n): c for n, c in enumerate(columns)}})
    [found] = compare_with_published(paper, ours, ratio)["metrics"]
    pairs = {f"{p['above']} > {p['below']}": p["verdict"] for p in found["pairs"]}
    return pairs, found["verdict"]


def test_an_order_that_our_intervals_confirm_is_reproduced() -> None:
    assert verdicts({"a": 9, "b": 5}) == ({"a > b": "reproduced"}, "reproduced")


def test_an_order_that_is_the_other_way_round_with_us_is_not() -> None:
    pairs, whole = verdicts({"a": 1, "b": 5, "c": 3})
    assert pairs == {
        "b > a": "not reproduced",
        "c > a": "not reproduced",
        "b > c": "not clear",
    }
    assert whole == "not reproduced"


def test_an_interval_with_1_in_it_says_nothing() -> None:
    assert verdicts({"b": 5, "c": 3}) == ({"b > c": "not clear"}, "not clear")


def test_columns_that_disagree_are_said_so_and_do_not_count() -> None:
    pairs, whole = verdicts({"a": 9, "b": 5}, {"a": 9, "b": 9.5})
    assert pairs == {"a > b": "the paper's columns disagree"}
    assert whole == "not measured"


def test_a_head_that_was_left_out_is_not_measured() -> None:
    pairs, whole = verdicts({"a": 9, "z": 5, "b": 2})
    assert pairs["a > z"] == "not measured"
    assert pairs["a > b"] == whole == "reproduced"


def test_heads_that_share_no_column_are_not_ordered() -> None:
    assert verdicts({"a": 9}, {"b": 5}) == ({}, "not measured")


def test_a_row_may_name_its_budget_and_has_the_papers_without() -> None:
    paper = PaperConfig(budget="own", published={"tau": {"x": {"a": 2.0, "b chain-8": 1.0}}})
    asked: list[tuple[str, str]] = []

    def noting(metric: str, head: str, budget: str) -> None:
        asked.append((head, budget))

    compare_with_published(paper, noting, ratio)
    assert asked == [("a", "own"), ("b", "chain-8")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, r"paper\.temperature: is 1"),
        ({"published": {"sped": {}}}, r"paper\.published\.sped: no metric 'sped'; did you mean"),
        ({"published": {"tau": {"x": {"q": 1.0}}}}, r"published\.tau\.x\.q: no head 'q'"),
        ({"published": {"tau": {"x": {"a own": 1.0}}}}, "budget 'own' is none of best"),
        ({"published": {"tau": {"x": {"a tree": 1.0}}}}, "no budget 'tree'"),
    ],
)
def test_what_the_comparison_does_not_have_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    config = ComparisonConfig(heads={"a": {}}, paper=PaperConfig(**changes))
    with pytest.raises(ConfigError, match=message):
        check_paper(config)


def test_the_key_of_a_wrong_row_is_named_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "paper.yaml"
    path.write_text("heads: {falcon: {}}\npaper:\n  published:\n    tau:\n      x: {falcn: 1.0}\n")
    line = refused("compare", path, "--dry-run")
    assert f"{path}:5: paper.published.tau.x.falcn: no head 'falcn'; did you mean" in line


def test_table_and_report_print_both_figures_and_the_verdict() -> None:
    paper = PaperConfig(
        source="A paper, Table 1",
        published={"speedup": {"Vicuna": {"a": 9.25, "b": 5.5}}},
        notes=["b is counted otherwise"],
    )
    found = results(measured(), paper=compare_with_published(paper, ours, ratio))
    for text in (format_comparison(found), render(found)):
        for words in ("A paper, Table 1", "Vicuna", "9.25", "5.5", "b is counted otherwise"):
            assert words in text
        assert "reproduced" in text
