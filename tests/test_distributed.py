"""Two gloo processes from the command line: one trains the target, measures, reports and speaks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from falcon_lab.config.schema import PretrainingConfig
from falcon_lab.pretraining.quality import Quality
from falcon_lab.pretraining.target import ensure_pretrained
from falcon_lab.report.history import read_history
from running import SMOKE, products, run_apart, smoke

TWO = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]


@pytest.mark.slow
def test_two_processes_run_every_stage_once(tmp_path: Path) -> None:
    job = ["run", SMOKE, f"out={tmp_path}/out", *smoke(*TWO, target=False)]
    done = run_apart(*job, FALCON_LAB_CACHE=str(tmp_path / "cache"))
    products(tmp_path / "out", ["chain", "tree"])
    for once in ("training it once", "— target", "— data", "— distil", "— evaluate", "— report"):
        assert done.stdout.count(once) == 1, done.stdout
    assert done.stdout.count("report.html") == 1
    assert "MEMBER: 2/2" in done.stderr
    assert "Traceback" not in done.stderr
    losses = [v for r in read_history(tmp_path / "out" / "history.jsonl") if (v := loss(r))]
    assert losses
    assert all(math.isfinite(value) for value in losses)
    assert processes_about(tmp_path) == []


def loss(record: dict[str, float]) -> float | None:
    return record.get("val/loss") or record.get("train/loss")


def processes_about(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(process.name) != os.getpid():
            found.append(line)
    return found


def test_another_process_of_a_machine_waits_for_the_target_and_trains_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    waits = []

    def first_process_finishes(seconds: float) -> None:
        waits.append(seconds)
        (tmp_path / "target").mkdir()
        figures = Quality(1.0, 1.0, 1.0, 1, True, "well")
        (tmp_path / "target" / "quality.json").write_text(json.dumps(figures.as_dict()))

    monkeypatch.setattr("time.sleep", first_process_finishes)
    ensure_pretrained("small", PretrainingConfig(), tmp_path / "target", never, never)
    assert len(waits) == 1


def never(*_: object) -> None:
    raise AssertionError("the first process does this")
