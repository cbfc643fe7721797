"""Two gloo processes from the command line: one trains the target, measures, reports and speaks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from falcon_lab.config.schema import PretrainingConfig
from falcon_lab.history import read_history
from falcon_lab.pretraining.quality import Quality
from falcon_lab.pretraining.target import ensure_pretrained
from running import SMOKE, command, environment, products, run_apart, smoke

TWO = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.accelerator=cpu"]


@pytest.mark.slow
def test_two_processes_are_ended_by_signals_and_run_every_stage_once(tmp_path: Path) -> None:
    # Validated twice: a signal between a checkpoint and a validation costs one point of the curve.
    steps = ["trainer.max_steps=8", "distillation.checkpoint_every=2"]
    job = ["run", SMOKE, f"out={tmp_path}/out", *smoke(*TWO, *steps, target=False)]
    env = {"FALCON_LAB_CACHE": str(tmp_path / "cache")}
    checkpoints = tmp_path / "out" / "checkpoints"
    first = ended_by(
        signal.SIGTERM, job, env, lambda said: any(checkpoints.glob("*.ckpt")), group=False
    )
    # At a terminal Ctrl-C goes to all of them.
    second = ended_by(signal.SIGINT, job, env, lambda said: "— evaluate" in said, group=True)
    for done, name in ((first, "SIGTERM"), (second, "SIGINT")):
        assert done.returncode == 128 + getattr(signal, name), done
        assert done.stdout.count(f"falcon-lab: ended by {name}") == 1, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
    last = run_apart(*job, **env)
    products(tmp_path / "out", ["chain", "tree"])
    for once in ("— target", "— data", "— distil", "— evaluate", "— report", "report.html"):
        assert last.stdout.count(once) == 1, last.stdout
    all_said = first.stdout + second.stdout + last.stdout + last.stderr
    assert all_said.count("training it once") == 1, all_said
    assert "MEMBER: 2/2" in first.stdout
    assert "Traceback" not in last.stderr
    losses = [v for r in read_history(tmp_path / "out" / "history.jsonl") if (v := loss(r))]
    assert losses
    assert all(math.isfinite(value) for value in losses)
    assert processes_about(tmp_path) == []


def ended_by(
    number: int,
    job: Sequence[str | Path],
    env: dict[str, str],
    due: Callable[[str], bool],
    *,
    group: bool,
) -> subprocess.CompletedProcess[str]:
    """A command that gets a signal when it is due, with all that it said.

    Args:
        number: of the signal.
        job: the command's arguments.
        env: variables of its environment.
        due: from what it has said so far.
        group: whether all of its processes get the signal, or the first one alone.
    """
    with tempfile.TemporaryFile("w+") as said:

        def so_far() -> str:
            return os.pread(said.fileno(), 10**7, 0).decode(errors="replace")

        process = subprocess.Popen(
            command(*job),
            env=environment(**env),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        end = time.monotonic() + 300
        while not due(so_far()):
            assert process.poll() is None, so_far()
            assert time.monotonic() < end, so_far()
            time.sleep(0.02)
        os.killpg(process.pid, number) if group else process.send_signal(number)
        code = process.wait(120)
        return subprocess.CompletedProcess(process.args, code, so_far())


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
