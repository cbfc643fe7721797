"""``benchmarks/distillation.py`` with small settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from distilling import batch, distillation
from falcon_bench.distillation_cost import LADDER, OURS, WARM_UP, Shape, StepCost, measure
from falcon_lab.errors import FalconLabError
from falcon_lab.studies.bench import machine
from running import ROOT
from tiny_models import save_tiny

SMALL = {"vocabulary": 4096, "hidden": 128, "sequences": 2, "length": 256}


@pytest.fixture
def script() -> Any:
    path = ROOT / "benchmarks" / "distillation.py"
    spec = importlib.util.spec_from_file_location("distillation_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _settings(folder: Path) -> list[str]:
    data = ["data.documents=6", "data.length=64", "data.batch_size=2"]
    return [f"target.name={json.dumps(str(save_tiny(folder)))}", *data]


def test_the_speed_of_every_rung_is_written(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    words = ["speed", *_settings(tmp_path / "target")]
    (path,) = script.main(words, tmp_path / "results", steps=2)
    assert path.name.endswith("-distillation-speed-cpu.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert list(results["loops"]) == [*LADDER, OURS]
    packed = [loop for name, loop in results["loops"].items() if "one document" not in name]
    assert all(loop["loss_difference"] < 1e-4 for loop in packed)
    assert all(len(loop["losses"]) == WARM_UP + 2 for loop in results["loops"].values())
    assert results["loops"][OURS]["ours_is_faster"] == 1
    assert set(results["parts"]) >= {"data", "teacher", "glance", "student", "loss", "backward"}
    assert results["cost"]["total"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in results["loops"])


def test_the_arms_of_precision_and_stored_features_are_written(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["arms", *_settings(tmp_path / "target")]
    (path,) = script.main(words, tmp_path / "results", steps=2)
    assert path.name.endswith("-distillation-arms-cpu.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    plain, stored, *lower = results["arms"].values()
    assert stored["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert [arm["losses"] == pytest.approx(plain["losses"], rel=0.1) for arm in lower] == [True] * 3
    assert plain["parts"]["teacher"] > stored["parts"]["teacher"]
    assert 0 < results["answer_tokens"] <= results["tokens"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in results["arms"])


def test_other_objectives_are_refused(script: Any, tmp_path: Path) -> None:
    words = ["speed", *_settings(tmp_path / "target"), "drafter.dropout=0.1"]
    with pytest.raises(FalconLabError, match=r"drafter\.dropout"):
        script.main(words, tmp_path / "results", steps=2)


@pytest.mark.slow
def test_memory_is_measured_in_processes_of_their_own(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**SMALL, "vocabulary": 32_768, "logits_mib": 4}
    shapes = [{"whole": True, **shape}, {"whole": False, **shape}]
    (path,) = script.main(["memory"], tmp_path, shapes)
    whole, ours = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    logits = 4 * 512 * 32_768  # bytes of those of all rows
    assert whole["growth"] > 4 * logits
    assert ours["growth"] < 2 * logits
    assert "4 MiB" in capsys.readouterr().out


def test_a_shape_that_does_not_fit_is_said_to_have_failed(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.executable", "false")  # dies without a word
    (path,) = script.main(["memory"], tmp_path, [{"whole": True, **SMALL}])
    (found,) = json.loads(path.read_text(encoding="utf-8"))["measured"]
    assert found["error"] == "exit 1"
    assert "exit 1" in capsys.readouterr().out


def test_measuring_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    measure(Shape(whole=False, **{**SMALL, "length": 32}))
    assert torch.equal(torch.rand(1), expected)


def test_a_step_s_cost_is_counted_from_shapes() -> None:
    module = distillation(block=2, fuse="linear", repeats=3)
    cost = StepCost.of(module, batch(0), glances=True)
    tokens, hidden, pairs = 48, 32, 2 * (8 * 9 // 2 + 16 * 17 // 2)
    head = 2 * hidden * 64 * tokens
    assert cost.heads == head * (1 + 3 * 3)
    layer = hidden * (hidden + 2 * hidden // 2 + hidden) + 3 * hidden * 2 * hidden
    attention = 4 * hidden * pairs
    assert cost.teacher == 2 * (2 * layer * tokens + attention)
    assert cost.glance == 3 * (2 * (layer + 2 * hidden * hidden) * tokens + attention)
    assert cost.student == 3 * cost.glance
    without = StepCost.of(module, batch(0), glances=False)
    assert cost.total - without.total == cost.glance + 3 * head
