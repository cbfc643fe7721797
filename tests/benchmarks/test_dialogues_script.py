"""``benchmarks/dialogues.py`` with a tiny chat target."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from chat_targets import save_chat_target
from running import ROOT


def test_the_script_writes_a_row_for_every_size(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("dialogues", ROOT / "benchmarks" / "dialogues.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    target = save_chat_target(tmp_path / "target")
    words = [f"target.name={target}", "sizes=1,3", "dialogues=2,4", "answer=6", "clock=cpu"]
    path = script.main(words, tmp_path)
    assert path.name.endswith("-dialogues-float32-cpu.json")
    first, second = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert (first["side_by_side"], second["side_by_side"]) == (1, 3)
    assert first["over_the_first"] == 1
    assert second["answer_tokens"] > 0
