"""``benchmarks/attention.py`` with small settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from running import ROOT

SMALL = ["shapes=4x2x8", "contexts=8,32", "rows=1,4", "seconds=0.001"]


@pytest.fixture
def script() -> Any:
    path = ROOT / "benchmarks" / "attention.py"
    spec = importlib.util.spec_from_file_location("attention_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_times_both_ways_and_finds_them_equal(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script.main(SMALL, tmp_path)
    assert "-attention-" in path.name
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["hardware"]["threads"] == 1
    [measured] = results["shapes"].values()
    assert measured["shape"]["groups"] == 2
    timings = measured["timings"]
    assert {(t["backend"], t["context"], t["rows"]) for t in timings} >= {
        (name, context, rows)
        for name in ("sdpa", "torch_flash")
        for context in (8, 32)
        for rows in (1, 4)
    }
    times = {(t["backend"], t["context"], t["rows"]): t["seconds"] for t in timings}
    for timing in timings:
        assert timing["off"] < 1e-2  # both are right, and tests of the backends say how exactly
        sdpa = times["sdpa", timing["context"], timing["rows"]]
        assert timing["over_sdpa"] == pytest.approx(sdpa / timing["seconds"])
    assert measured["picked"] is None or measured["picked"][0] in ("torch_flash", "flash_attn")
    names = {timing["backend"] for timing in timings}
    assert names | set(measured["left_out"]) == {"sdpa", "torch_flash", "flash_attn"}
    shown = capsys.readouterr().out
    assert "4x2x8 (ms a layer)" in shown
    assert shown.count("×)") == 4 * (len(names) - 1)


def test_a_key_that_is_none_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no key head"):
        script.main(["head=3"], tmp_path)
