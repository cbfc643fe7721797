from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.measure.results import build_results, write_results
from falcon_lab.studies.variants import difference, figures, format_variants, spread, tabulate
from measuring import EXPERIMENT, HEADER, TARGET, measurement


def finished(folder: Path, rate: float, *, measured: bool = True) -> Path:
    folder.mkdir()
    history = [{"step": 5, "val/accept_rate": 0.0}, {"step": 9, "val/accept_rate": rate}]
    history.append({"step": 9, "train/loss": 1.0})
    text = "".join(json.dumps(record) + "\n" for record in history)
    (folder / "history.jsonl").write_text(text)
    if measured:
        results = build_results(measurement(4), experiment=EXPERIMENT, target=TARGET, header=HEADER)
        write_results(folder / "results.json", results)
    return folder


def test_figures_are_the_last_validation_and_every_methods_speed(tmp_path: Path) -> None:
    found = figures(finished(tmp_path / "a", 0.75))
    assert found["val/accept_rate"] == 0.75
    assert {"chain: τ", "tree: τ", "chain: speed-up", "tree: speed-up"} <= set(found)
    assert found["tree: τ"] > 1
    assert "train/loss" not in found
    assert "plain: speed-up" not in found


def test_a_run_without_an_evaluation_has_its_validation(tmp_path: Path) -> None:
    assert figures(finished(tmp_path / "a", 0.5, measured=False)) == {"val/accept_rate": 0.5}


def test_variants_stand_side_by_side_and_in_a_file(tmp_path: Path) -> None:
    runs = [
        (name, seed, finished(tmp_path / f"{name}{seed}", rate, measured=False))
        for name, seed, rate in (
            ("csgd", 0, 0.5),
            ("csgd", 1, 0.7),
            ("none", 0, 0.4),
            ("none", 1, 0.65),
        )
    ]
    head, _, line = tabulate(runs, tmp_path).splitlines()
    assert head.split("  ")[-1] == "none − csgd"
    assert "0.600 [0.500, 0.700]" in line
    assert "0.525 [0.400, 0.650]" in line
    assert line.endswith("-0.075 [-0.100, -0.050]")
    rows = json.loads((tmp_path / "variants.json").read_text())
    assert [(row["variant"], row["seed"]) for row in rows] == [(n, s) for n, s, _ in runs]


def test_what_a_variant_lacks_is_a_dash() -> None:
    rows: list[dict[str, Any]] = [
        {"variant": "a", "seed": 0, "figures": {"x": 1.0}},
        {"variant": "b", "seed": 1, "figures": {"x": 2.0, "y": 3.0}},
    ]
    lines = format_variants(rows).splitlines()
    assert lines[2].split()[-1] == "—"  # no seed in common
    assert lines[3].split()[:2] == ["y", "—"]


def test_spread_and_difference() -> None:
    assert spread([1.0, 2.0]) == "1.500 [1.000, 2.000]"
    assert spread([]) == "—"
    assert difference({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.0, 2: 9.0}) == "+0.250 [+0.000, +0.500]"
    assert difference({0: 1.0}, {1: 1.0}) == "—"


@pytest.mark.parametrize("name", ["x", "val/y"])
def test_a_table_of_one_variant_has_no_difference(name: str) -> None:
    [head, _, line] = format_variants(
        [{"variant": "only", "seed": 0, "figures": {name: 1.0}}]
    ).splitlines()
    assert "−" not in head
    assert line.split()[0] == name


def test_a_method_with_a_lossy_rule_is_called_so_among_the_variants(tmp_path: Path) -> None:
    found = build_results(
        measurement(4, lossy=True), experiment=EXPERIMENT, target=TARGET, header=HEADER
    )
    write_results(tmp_path / "results.json", found)
    assert {"chain: τ", "tree (lossy): τ", "tree (lossy): speed-up"} <= set(figures(tmp_path))
