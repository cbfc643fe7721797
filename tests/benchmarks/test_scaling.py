"""Growth of costs: the line, the turns, and the script with small sizes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from falcon_bench.scaling_cost import Line, alternate, curves
from falcon_lab.measure.pass_costs import Sizes, TimedPass, shaped_like, timed_passes, tree_of
from falcon_lab.plugins.discovery import load_components
from running import ROOT
from saved_models import save_models
from tiny_models import POSITIONS, tiny_target

CPU = torch.device("cpu")
SMALL = Sizes([1, 2, 4], [8, 300], [1, 2], [64, 96], tree=3, context=10)
FALCON = {"name": "falcon", "block": 2}


@given(
    intercept=st.floats(1e-5, 1.0),
    slope=st.floats(1e-7, 1e-2),
    sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=8, unique=True),
)
def test_a_line_is_found_again(intercept: float, slope: float, sizes: list[int]) -> None:
    assume(slope * (max(sizes) - min(sizes)) > 1e-3 * intercept)
    assume(intercept > 1e-3 * slope * min(sizes))
    line = Line.through(sizes, [intercept + slope * size for size in sizes])
    assert line.intercept == pytest.approx(intercept, rel=1e-3)
    assert line.slope == pytest.approx(slope, rel=1e-3)
    assert line.deviation < 1e-6


def test_what_is_no_line_is_told() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    assert Line.through(sizes, [size**2 for size in sizes]).deviation > 0.5
    assert Line.through([4, 4], [1.0, 3.0]) == Line(2.0, 0.0, 0.5)


def test_passes_take_turns_and_are_made_ready_and_cleaned_up_after_each() -> None:
    seen: list[str] = []

    def note(name: str) -> TimedPass:
        return TimedPass(
            name,
            "nodes",
            1,
            run=lambda: seen.append(name),
            before=lambda: seen.append("("),
            after=lambda: seen.append(")"),
        )

    taken = alternate([note("a"), note("b"), note("c")], 3, CPU)
    order = "".join(seen).replace("(", "").replace(")", "")
    assert order == "aabbcc" + "bbccaa" + "ccaabb"
    assert "".join(seen).startswith("(a)(a)(b)(b)")
    assert [len(each) for each in taken] == [3, 3, 3]


def test_a_point_is_the_median_of_its_turns() -> None:
    def timed(size: int) -> TimedPass:
        return TimedPass("pass", "nodes", size, run=lambda: None)

    [curve] = curves([timed(1), timed(3)], [[1.0, 9.0, 2.0], [4.0, 4.0, 4.0]])
    assert [point["seconds"] for point in curve["points"]] == [2.0, 4.0]
    assert curve["points"][0]["low"] == 1.5
    assert curve["line"]["slope"] == pytest.approx(1.0)


def test_every_pass_can_be_run_again_and_again() -> None:
    target = tiny_target()
    found = timed_passes(target, load_components(), FALCON, SMALL)
    along = {(timed.along, timed.what): [] for timed in found}
    for timed in found:
        along[timed.along, timed.what].append(timed.size)
    assert along == {
        ("nodes", "target, a tree"): [1, 2, 4],
        ("nodes", "drafter, new blocks"): [2, 4],
        ("context", "target, one token"): [8, 300],
        ("context", "target, a tree"): [8, 300],
        ("context", "drafter, last block"): [8, 300],
        ("batch", "target, a tree"): [1, 2],
        ("vocabulary", "target, a tree"): [64, 96],
        ("vocabulary", "drafter, last block"): [64, 96],
    }
    for timed in found:
        outputs = []
        for _ in range(2):
            timed.before()
            outputs.append(timed.run())
            timed.after()
        first, second = (output.logits for output in outputs)
        assert torch.allclose(first, second, atol=1e-5)
        if timed.along == "vocabulary":
            assert first.shape[-1] == timed.size


def test_a_model_of_the_same_shape_goes_on_where_the_target_ends() -> None:
    target = tiny_target()
    longer = shaped_like(target, max_position_embeddings=2 * POSITIONS)
    assert longer.max_positions == 2 * POSITIONS
    assert target.max_positions == POSITIONS
    assert longer.config.num_hidden_layers == target.config.num_hidden_layers


def test_trees_are_binary() -> None:
    tree = tree_of(6, CPU)
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    assert tree.depth.tolist() == [0, 1, 1, 2, 2, 2]


def test_the_script_writes_figures_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ROOT / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling_script", path)
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = save_models(tmp_path) / "target"
    words = ["turns=2", "nodes=1,2,4", "contexts=8,16", "batches=1,2", "vocabularies=64,128"]
    words.append("draft_vocabularies=16,100")
    written = script.main([*words, "context=10", f"target.name={folder}"], tmp_path / "results")
    results = json.loads(written.read_text(encoding="utf-8"))
    assert results["hardware"]["threads"] == 1
    assert results["target"]["lean"]
    assert results["sizes"]["tree"] == 8
    for curve in results["curves"]:
        for point in curve["points"]:
            assert 0 < point["low"] <= point["seconds"] <= point["high"]
    drafted = [curve for curve in results["curves"] if curve["along"] == "draft vocabulary"]
    assert [[point["size"] for point in curve["points"]] for curve in drafted] == [[16, 100]]
    assert "Along the nodes" in written.with_suffix(".svg").read_text("utf-8")
    assert "off the line" in capsys.readouterr().out
