"""Throughput by batch size: the script, the command and the figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.generation import Seconds
from falcon_lab.errors import FalconLabError
from falcon_lab.studies.bench.batches import bench_batches, split
from falcon_lab.studies.bench.report import format_batches
from running import ROOT, refused, run
from saved_models import save_models

TEXTS = "evaluation.prompts.texts=[abc def, hello there world, x]"
SMALL = [TEXTS, "evaluation.max_new_tokens=8", "evaluation.repeats=1"]
METHODS = ["plain", "chain depth=6", "static template=k2-8"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models")) / "drafter"


@pytest.fixture(scope="module")
def written(drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the script writes."""
    spec = importlib.util.spec_from_file_location("batches", ROOT / "benchmarks" / "batches.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("results")
    path: Path = script.main([str(drafter), "sizes=1,2", "clock=cpu", *SMALL], folder)
    return path


@pytest.fixture
def results(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return found


def test_the_script_writes_figures_and_a_picture(written: Path, results: dict[str, Any]) -> None:
    assert written.name.endswith("-batches-cpu.json")
    assert "chain depth=6" in written.with_suffix(".svg").read_text("utf-8")
    assert list(results["methods"]) == METHODS
    assert (results["prompts"], results["sizes"]) == (3, [1, 2])
    assert results["hardware"]["threads"] == 1
    assert results["target"]["lean"] is True
    assert results["clock"] == "cpu"
    assert "Seconds of a core" in format_batches(results)


def test_there_are_two_clocks() -> None:
    with pytest.raises(FalconLabError, match="wall or cpu"):
        bench_batches(Experiment(), [1], announce=print, clock="sun")


def test_every_size_writes_plain_decodings_texts(results: dict[str, Any]) -> None:
    for found in results["methods"].values():
        points = [found["alone"], *found["batches"]]
        assert [one["size"] for one in points] == [0, 1, 2]
        assert {one["identical"] for one in points} == {1.0}
        assert len({one["tokens"] for one in points}) == 1
        for one in points:
            assert one["tokens_per_second"] == one["tokens"] / one["seconds"]
            assert sum(one["split"].values()) == pytest.approx(100)


def test_the_table_has_a_column_for_every_size(results: dict[str, Any]) -> None:
    plain, chain, *_ = results["methods"].values()
    plain["batches"][1]["tokens_per_second"], plain["alone"]["tokens_per_second"] = 40.0, 20.0
    chain["batches"][1]["tokens_per_second"], chain["alone"]["tokens_per_second"] = 100.0, 30.0
    table = format_batches(results).splitlines()
    assert table[0].split("  ")[0] == "tok/s (over plain)"
    [line] = [line for line in table if line.startswith("chain")]
    assert "30 (1.50×)" in line
    assert line.endswith("100 (2.50×)")
    assert not any("!" in line for line in table)


def test_texts_that_differ_are_told(results: dict[str, Any]) -> None:
    results["methods"]["chain depth=6"]["batches"][1]["identical"] = 0.5
    assert "! chain depth=6, B = 2: 50% of the texts" in format_batches(results)
    results["methods"]["chain depth=6"]["lossless"] = False
    assert "!" not in format_batches(results)
    assert "chain depth=6 (lossy)" in format_batches(results)


def test_shares_are_of_all_parts() -> None:
    shares = split([Seconds(prefill=1, draft=2, total=5), Seconds(verify=1, total=1)])
    assert shares == {"prefill": 25, "draft": 50, "verify": 25, "accept": 0} | {
        "commit": 0,
        "overhead": 0,
    }


def test_the_command_measures_the_sizes_that_are_asked_for(drafter: Path, tmp_path: Path) -> None:
    into = tmp_path / "batches.json"
    printed = run(
        *("bench", "--drafter", drafter, "--tree", "chain,depth=3"),
        *("--batch-sizes", "3,1", "--json", into, *SMALL),
    )
    assert printed.splitlines()[0].split()[-6:] == ["B", "=", "1", "B", "=", "3"]
    found = json.loads(into.read_text("utf-8"))
    assert list(found["methods"]) == ["plain", "chain depth=3"]
    assert found["clock"] == "wall"


@pytest.mark.parametrize("sizes", ["0,1", "two", "1,,2"])
def test_a_size_is_a_number_of_at_least_one(sizes: str) -> None:
    assert "--batch-sizes" in refused("bench", "--batch-sizes", sizes)


def test_other_peoples_loops_have_no_batches(drafter: Path) -> None:
    line = refused("bench", "--drafter", drafter, "--batch-sizes", "2", "--method", "hf")
    assert "leave out --method" in line
