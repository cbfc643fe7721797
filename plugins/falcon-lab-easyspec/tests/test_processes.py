"""Attentions of a group on two processes, one of which is this."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from easyspec_cases import LAYERS
from falcon_lab_easyspec import EasySpecConfig
from falcon_lab_easyspec.__main__ import main
from falcon_lab_easyspec.drafter import SideBySideDrafter
from falcon_lab_easyspec.processes import Processes, connected
from shared_work import PROMPT, lean_target, states_under, work

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, LayerPlan

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    paths = os.pathsep.join(sys.path)
    other = subprocess.Popen(
        [sys.executable, str(HERE / "second_process.py"), store],
        env=os.environ | {"RANK": "1", "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        found = work(store)
    finally:
        _, said = other.communicate(timeout=60)
    assert other.returncode == 0, said
    config = EasySpecConfig(size=3)
    half = lean_target(torch.bfloat16)
    plan = SideBySideDrafter(config, BuildContext(half)).plan
    torch.testing.assert_close(found.states, states_under(half, plan), rtol=0.02, atol=0.02)
    target = lean_target()
    alone = SideBySideDrafter(config, BuildContext(target))
    expected = testing.write(testing.engine(target, alone), PROMPT, 24)
    assert found.text == expected.tokens == testing.plain_text(target, PROMPT, 24)
    assert found.accepted == [one.accepted for one in expected.rounds]
    assert sum(found.accepted) > 0


def test_a_missing_process_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FalconLabError, match="not all of 2 processes have come"),
        connected(torch.device("cpu"), init=f"file://{tmp_path / 'store'}", seconds=0.2),
    ):
        pass


def test_processes_that_nobody_launched_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    refused = CliRunner().invoke(main, ["processes", "anything", "a prompt"])
    assert refused.exit_code == 2
    [line] = refused.stderr.splitlines()
    assert line.startswith("falcon-lab: RANK is not set; start the processes by torchrun")


def test_the_command_prints_what_one_process_and_all_of_them_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    meet = partial(connected, init=f"file://{tmp_path / 'store'}")
    monkeypatch.setattr("falcon_lab_easyspec.processes.connected", meet)
    monkeypatch.setattr("falcon_lab.pretraining.target.ensure_target", lambda _: lean_target())
    words = ["processes", "anything", "a prompt", "--tokens", "6"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    *_, alone, together = done.stdout.splitlines()
    assert alone.startswith("1 process: 6 tokens in ")
    assert together.startswith("1 processes: 6 tokens in ")


def test_a_process_that_would_compute_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with connected(torch.device("cpu"), init=f"file://{tmp_path / 'store'}") as processes:
        assert isinstance(processes, Processes)
        everything = LayerPlan(groups=((0, 1, 2), (3, 4, 5)))
        processes.check(everything, LAYERS)
        processes.count = 4
        processes.check(LayerPlan(groups=((0, 1, 2),)), LAYERS)
        with pytest.raises(FalconLabError, match="process 3 would compute no attention"):
            processes.check(everything, LAYERS)
