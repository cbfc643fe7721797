"""The stage as a whole is run by tests/test_experiments.py."""

from __future__ import annotations

import json
from pathlib import Path
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
def tracked(tmp_path: Path) -> Tracked:
    """Loggers of a run that is offline, with curves."""
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps(record) + "\n" for record in HISTORY))
    return Tracked(history, tmp_path / "wandb" / "offline-run")


def written(tracked: Any, *overrides: str) -> str:
    """What is said of a report on training-free methods that were measured."""
    results = build_results(measurement(3), experiment=EXPERIMENT, target=TARGET, header=HEADER)
    lines: list[str] = []
    write_everything(
        load_experiment(None, overrides),
        {"trees": [], **results},
        tracked.history.parent,
        drafter=None,
        tracking=tracked,
        announce=lines.append,
    )
    [said] = lines
    return said


def test_the_report_is_written_and_every_path_is_said(tracked: Tracked, tmp_path: Path) -> None:
    said = written(tracked)
    assert str(tmp_path / "report.html") in said
    assert f"wandb sync {tmp_path / 'wandb' / 'offline-run'}" in said
    assert (tmp_path / "report.html").exists()
    assert len(tracked.results) == 1


def test_without_a_drafter_of_its_own_a_run_has_no_card(tracked: Tracked) -> None:
    assert "drafter  " not in written(tracked)
    assert tracked.drafters == []


def test_the_html_can_be_left_out(tracked: Tracked, tmp_path: Path) -> None:
    assert "report.html" not in written(tracked, "report.html=false")
    assert not (tmp_path / "report.html").exists()
