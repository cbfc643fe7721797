"""Two gloo processes from the command line: one trains the target, measures, reports and speaks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import PretrainingConfig
from falcon_lab.history import read_history
from falcon_lab.pretraining.quality import Quality
from falcon_lab.pretraining.target import ensure_pretrained
from falcon_lab.run import training_facts
from falcon_lab.training import LAST
from running import SMOKE, command, environment, products, run_apart, smoke
from sharing import SMALL, killed, trained
from tiny_models import save_tiny

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


def test_processes_that_share_a_target_train_what_one_process_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "target")
    workers = [share_of(rank, tmp_path) for rank in (0, 1)]
    trained(Path("four"), "data.batch_size=4")
    trained(Path("two"), "data.batch_size=2")
    outputs = [worker.communicate(timeout=500)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert ["shared by 2 × 1 processes" in said for said in outputs] == [True, False]
    assert all("layers are seen: True" in said for said in outputs), outputs
    for shared, alone in (("sharded", "four"), ("parts", "four"), ("divided", "two")):
        torch.testing.assert_close(curve(shared), curve(alone), rtol=1e-4, atol=1e-5)
        same_drafter(shared, alone, atol=1e-4)
    same_drafter("resumed", "sharded", atol=0)
    same_drafter("resumed-parts", "parts", atol=0)
    # In one process the checkpoint goes on too, with two batches of that size to a step.
    shutil.copytree("parts", "alone")
    killed(Path("alone"))
    settings = ["data.batch_size=2", "trainer.accumulate_grad_batches=2"]
    facts = training_facts(load_experiment(None, ["out=alone", *SMALL, *settings]))
    Path("alone", "training.json").write_text(json.dumps(facts))
    trained(Path("alone"), *settings)
    same_drafter("alone", "four", atol=1e-4)
    for run in ("sharded", "parts"):
        state = torch.load(Path(run, "checkpoints", LAST), weights_only=True)["state_dict"]
        saved = load_file(Path(run, "drafter", "model.safetensors"))
        assert {name.removeprefix("drafter.") for name in state} == set(saved)


def share_of(rank: int, folder: Path) -> subprocess.Popen[str]:
    """One of two processes of ``sharing.py`` in a folder."""
    port = 20000 + os.getpid() % 20000
    here = Path(__file__).parent
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    env |= {"WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "PYTHONPATH": str(here)}
    return subprocess.Popen(
        [sys.executable, str(here / "sharing.py")],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def curve(folder: str) -> torch.Tensor:
    """Losses and norms of gradients, step by step, and the validation's loss."""
    history = read_history(Path(folder) / "history.jsonl")
    names = ("train/loss", "train/grad_norm", "val/loss")
    return torch.tensor([record[name] for record in history for name in names if name in record])


def same_drafter(one: str, other: str, *, atol: float) -> None:
    """See that two runs saved the same weights, none missing."""
    files = [Path(run) / "drafter" / "model.safetensors" for run in (one, other)]
    torch.testing.assert_close(*map(load_file, files), rtol=0, atol=atol)


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
