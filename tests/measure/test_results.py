"""``results.json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.errors import FalconLabError
from falcon_lab.measure.measurement import Measurement
from falcon_lab.measure.results import (
    build_results,
    load_results,
    records_of,
    refuse_foreign,
    replace_results,
    write_results,
)
from falcon_lab.report.report import write_report
from measuring import EXPERIMENT, HEADER, HISTORY, TARGET, TREE, measurement

DOCUMENT = Path(__file__).parents[2] / "docs" / "results-schema.md"

COMPONENTS = {"tree": {"drafter": {"name": "falcon", "distribution": "falcon-lab", "version": "1"}}}


def build(found: Measurement | None = None, **changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "experiment": EXPERIMENT,
        "target": TARGET,
        "header": HEADER,
        "components": COMPONENTS,
        "labels": {"tree": "falcon, k=2"},
        "left_out": {"lookup": "not installed"},
        "trees": [TREE],
    }
    return build_results(found or measurement(3, diverging=True), **{**arguments, **changes})


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    built = build()
    path = write_results(tmp_path / "deep" / "results.json", built)
    assert load_results(path) == json.loads(json.dumps(built))
    assert load_results(path.parent) == load_results(path)
    assert list(path.parent.iterdir()) == [path]


def test_rows_come_back_as_they_were_measured(tmp_path: Path) -> None:
    found = measurement(3)
    loaded = load_results(write_results(tmp_path / "results.json", build(found)))
    for method, rows in found.records.items():
        assert records_of(loaded, method) == rows


def test_a_report_can_be_made_from_the_file_alone(tmp_path: Path) -> None:
    loaded = load_results(write_results(tmp_path / "results.json", build()))
    assert write_report(tmp_path, loaded, HISTORY, loaded["trees"]).stat().st_size > 10_000


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = write_results(tmp_path / "results.json", build())
    path.write_text(path.read_text()[:-100])
    with pytest.raises(FalconLabError, match=rf"{re.escape(str(path))}: .*not whole JSON"):
        load_results(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no results of an evaluation"),
        ('{"a": 1}', "no results of an evaluation"),
        ('{"rows": [], "methods": {}, "schema": 99}', "the field is required"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(FalconLabError, match=said):
        load_results(tmp_path)


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match="run the evaluate stage"):
        load_results(tmp_path / "results.json")


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    built = build()
    built["target"] = {"loss": math.nan, "more": [math.inf, Path("x"), True]}
    loaded = load_results(write_results(tmp_path / "results.json", built))
    assert loaded["target"] == {"loss": None, "more": [None, "x", True]}


def test_the_headline_is_the_fastest_lossless_method_of_the_runs_own_drafter() -> None:
    assert build()["headline"] == "tree"
    assert build(measurement(3, lossy=True))["headline"] == "chain"
    rival = {"evaluation": {"methods": {"chain": {}, "tree": {"drafter": {"name": "lookup"}}}}}
    assert build(experiment=rival)["headline"] == "chain"
    assert build(headline="chain")["headline"] == "chain"
    alone = Measurement({"plain": measurement(2).records["plain"]}, {"plain": True})
    assert build(alone)["headline"] is None
    with pytest.raises(ValueError, match="'twig' was not measured"):
        build(headline="twig")


def test_the_document_and_the_code_name_the_same_keys(tmp_path: Path) -> None:
    loaded = load_results(write_results(tmp_path / "results.json", build()))
    written = {re.sub(r"\.(tree|chain|plain|HF generate)\b", ".<method>", k) for k in keys(loaded)}
    documented = set(re.findall(r"^\| `([^`]+)` \|", DOCUMENT.read_text(encoding="utf-8"), re.M))
    assert documented == written


OPEN = ("experiment", "versions", "components", "labels", "left_out", "finish", "quality")
"""Mappings whose keys are not ours to fix."""


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys; ``[]`` stands for the entries of a list of mappings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = f"{prefix}.{key}" if prefix else key
            yield name
            if key not in OPEN:
                yield from keys(inner, name)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for inner in value:
            yield from keys(inner, f"{prefix}[]")


def test_results_of_other_settings_are_kept_with_what_was_made_of_them(tmp_path: Path) -> None:
    path, page, said = tmp_path / "results.json", tmp_path / "report.html", list[str]()

    def replace(built: Any) -> None:
        replace_results(path, built, [page], announce=said.append)
        page.write_text(json.dumps(built["experiment"]))

    first, other = build(), build()
    other["experiment"] = first["experiment"] | {"evaluation": {"max_new_tokens": 1}}
    replace(first)
    replace(first)
    assert said == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["report.html", path.name]
    replace(other)
    assert len(said) == 1
    assert str(tmp_path / "results.1.json") in said[0]
    assert load_results(tmp_path / "results.1.json")["experiment"] == first["experiment"]
    assert load_results(path)["experiment"] == other["experiment"]
    assert json.loads((tmp_path / "report.1.html").read_text()) == first["experiment"]


def test_a_file_that_holds_no_results_is_not_replaced(tmp_path: Path) -> None:
    path = write_results(tmp_path / "results.json", build())
    refuse_foreign(path)
    refuse_foreign(tmp_path / "none.json")
    path.write_text('{"mine": 1}')
    with pytest.raises(FalconLabError, match=r"results\.json: no results of falcon-lab"):
        refuse_foreign(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"headline": "gone"}, "no method 'gone'"),
        ({"rows": []}, "one row for every prompt"),
        ({"methods": {}}, "there is no method"),
        ({"hardware": None}, "hardware: must be an object"),
        ({"trees": [{"tokens": [1], "parents": [4], "texts": ["a"], "accepted": [0]}]}, "a parent"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = write_results(tmp_path / "results.json", build() | change)
    with pytest.raises(FalconLabError, match=rf"results\.json: no results .*{said}"):
        load_results(path)
