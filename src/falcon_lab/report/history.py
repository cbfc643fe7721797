"""Training curves in the run folder: JSON lines that need no account and survive a kill.

Reading training curves back, without Lightning.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from falcon_lab.files import append_line, read_lines


class HistoryLogger(Logger):
    """Appends ``{"step": …, "<metric>": …}`` lines to one file.

    A resumed run goes on in the same file. Steps that were logged before a kill and are trained
    again stand twice; ``read_history`` keeps the later ones.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """Lightning asks."""
        return "history"

    @property
    def version(self) -> str:
        """Lightning asks."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """The file."""
        return self.path

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The configuration is kept in ``results.json``."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line."""
        line = {"step": step} | {name: float(value) for name, value in metrics.items()}
        append_line(self.path, line)


def read_history(path: Path) -> list[dict[str, Any]]:
    """One dict a step, steps ascending: ``step`` and the metrics logged there.

    Reads the JSON lines of ``HistoryLogger`` and the CSV of Lightning's ``CSVLogger``; a missing
    file is an empty history. A step that stands twice (trained again after a kill) keeps the later
    values. Lines that a kill cut off are left out.
    """
    if not path.exists():
        return []
    records = _csv(path) if path.suffix == ".csv" else read_lines(path)
    steps: dict[int, dict[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if isinstance(step, int):
            steps.setdefault(step, {}).update(record)
    return [steps[step] for step in sorted(steps)]


def _csv(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            values = {key: _number(text) for key, text in row.items() if key and text}
            if isinstance(values.get("step"), float):
                values["step"] = int(values["step"])
            yield {key: value for key, value in values.items() if value is not None}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None


def series(history: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    points = [(r["step"], r[metric]) for r in history if isinstance(r.get(metric), int | float)]
    return [step for step, _ in points], [value for _, value in points]
