"""The stage as a whole is run by tests/test_experiments.py."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from falcon_lab.config.load import load_experiment
from falcon_lab.measure.results import build_results
from falcon_lab.report.stage import write_everything
from measuring import EXPERIMENT, HEADER, HISTORY, TARGET, measurement


class Tracked:
    """Takes what would go to W&B."""

    def __init__(self, history: Path, offline: Path | None) -> None:
        self.history, self.offline_folder = history, offline
        self.results: list[Any] = []
        self.drafters: list[Path] = []

    def log_results(self, results: Any, trees: Any) -> None:
        self.results.append(results)

    def log_drafter(self, folder: Path, **_: Any) -> None:
        self.drafters.append(folder)


@pytest.fixture
def current(tmp_path: Path) -> Any:
    """A run of training-free methods that was measured."""
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    results = build_results(measurement(3), experiment=EXPERIMENT, target=TARGET, header=HEADER)
    lines: list[str] = []
    return SimpleNamespace(
        experiment=load_experiment(None),
        folder=tmp_path,
        drafter_folder=tmp_path / "drafter",
        training_done=False,
        load_results=lambda: {"trees": [], **results},
        tracking=Tracked(history, tmp_path / "wandb" / "offline-run"),
        announce=lines.append,
        lines=lines,
    )


def test_the_report_is_written_and_every_path_is_said(current: Any) -> None:
    write_everything(current)
    [said] = current.lines
    assert str(current.folder / "report.html") in said
    assert f"wandb sync {current.folder / 'wandb' / 'offline-run'}" in said
    assert (current.folder / "report.html").exists()
    assert len(current.tracking.results) == 1


def test_without_a_drafter_of_its_own_a_run_has_no_card(current: Any) -> None:
    write_everything(current)
    assert current.tracking.drafters == []
    assert "drafter  " not in current.lines[0]


def test_the_html_can_be_left_out(current: Any) -> None:
    current.experiment.report.html = False
    write_everything(current)
    assert not (current.folder / "report.html").exists()
    assert "report.html" not in current.lines[0]
