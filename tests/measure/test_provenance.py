"""Where results come from."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

from falcon_lab.measure import provenance
from tiny_models import tiny_target


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def test_git_state_tells_a_clean_tree_from_a_dirty_one(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "one")
    clean = provenance.git_state(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "untracked").write_text("runs")
    assert provenance.git_state(tmp_path) == clean
    (tmp_path / "a").write_text("2")
    assert provenance.git_state(tmp_path) == {**clean, "dirty": True}


def test_outside_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_state(tmp_path) is None


def test_without_git_there_is_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(tmp_path) is None


def test_versions_name_what_a_result_depends_on() -> None:
    found = provenance.versions()
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["falcon-lab"]


def test_hardware_on_a_cpu_names_it_and_no_gpu() -> None:
    found = provenance.hardware(device="cpu", dtype="float32", threads=3)
    assert found["threads"] == 3
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["gpu"] is None
    assert provenance.hardware()["threads"] == torch.get_num_threads()


def test_the_processors_name_is_read_and_its_absence_survived(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast: 3000\nmodel name\t: Fast: 3000\n")
    assert provenance.cpu_model(info) == "Fast: 3000"
    assert provenance.cpu_model(tmp_path / "absent")


def test_the_command_is_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/lightning", "run", "a b.yaml", "seed=1"])
    assert provenance.command_line() == "lightning run 'a b.yaml' seed=1"


def test_one_header_states_where_a_result_came_from(tmp_path: Path) -> None:
    found = provenance.header(device="cpu", dtype="float32", threads=3, folder=tmp_path)
    assert list(found) == ["date", "command", "versions", "hardware", "git"]
    assert found["hardware"]["threads"] == 3
    assert datetime.fromisoformat(found["date"]).tzinfo is not None


def test_a_header_takes_device_and_type_from_the_target() -> None:
    target = tiny_target("llama")
    hardware = provenance.header(target)["hardware"]
    assert (hardware["device"], hardware["dtype"]) == ("cpu", str(target.dtype))
