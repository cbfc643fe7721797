"""``benchmarks/decoding.py`` with small settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.studies.bench import machine
from running import ROOT
from saved_models import PROMPTS, save_models


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("decoding", ROOT / "benchmarks" / "decoding.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_writes_figures_and_no_answers(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")  # lookup is then left out
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    drafter = save_models(tmp_path) / "drafter"
    small = [PROMPTS, "evaluation.max_new_tokens=8", "evaluation.repeats=1"]
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text("tree: {name: chain, depth: 2}\n", encoding="utf-8")
    path = script.main([str(drafter), str(tuned), *small], tmp_path / "results")
    assert path.name.endswith("-decoding-cpu.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    measured = set(results["methods"])
    assert {"plain", "HF generate", "chain depth=8", "static template=k2-10-d8"} <= measured
    assert str(tuned) in measured
    assert list(results["left_out"]) == ["HF assisted", "llama.cpp", "lookup"]
    assert results["hardware"]["threads"] == 1
    assert results["bench"]["machine"]["matrix_side"] == 128
    for row in results["rows"]:
        assert all(not {"tokens", "text"} & set(turn) for turn in row["turns"])
    assert "GFLOP/s" in capsys.readouterr().out
