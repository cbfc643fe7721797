"""A run that is killed again and again ends with the drafter of a run that was left alone."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KILLS = 10
DRAFTER = Path("drafter") / "model.safetensors"

OVERRIDES = [
    "target.pretraining.steps=12",
    "target.pretraining.checkpoint_every=3",
    "trainer.max_steps=30",
    "distillation.checkpoint_every=3",
    "evaluation.hf_generate=false",
    "evaluation.max_new_tokens=8",
]


def command(out: Path) -> list[str]:
    recipe = str(ROOT / "experiments" / "smoke.yaml")
    return [sys.executable, "-m", "falcon_lab", "run", recipe, f"out={out}", *OVERRIDES]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "FALCON_LAB_CACHE": str(cache), "WANDB_MODE": "disabled"}


def finish(out: Path, cache: Path) -> float:
    """Run to the end; the seconds it took."""
    start = time.monotonic()
    done = subprocess.run(
        command(out), env=environment(cache), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return time.monotonic() - start


def kill_after(seconds: float, out: Path, cache: Path) -> bool:
    """Start the run and kill it outright; False when it was done before."""
    process = subprocess.Popen(
        command(out),
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_drafter(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", tmp_path / "cache-whole")
    expected = (tmp_path / "whole" / DRAFTER).read_bytes()
    moments, killed, kills = random.Random(20261121), tmp_path / "killed", 0
    for _ in range(3 * KILLS):
        if kill_after(moments.uniform(0.3, 0.98) * whole, killed, tmp_path / "cache"):
            kills += 1
        else:  # it had come to its end: from the beginning again
            assert (killed / DRAFTER).read_bytes() == expected
            shutil.rmtree(killed)
        if kills == KILLS:
            break
    assert kills == KILLS
    finish(killed, tmp_path / "cache")
    assert (killed / DRAFTER).read_bytes() == expected
