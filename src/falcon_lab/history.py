"""Training curves in the run folder: JSON lines that need no account and survive a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from falcon_lab.files import append_line, read_lines


class HistoryLogger(Logger):
    """Appends ``{"step": …, "<metric>": …}`` lines to one file.

    A resumed run continues the same file. Steps that were logged before a kill and are trained
    again stand twice; ``read_history`` returns the later ones.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """Name the logger, as Lightning requires."""
        return "history"

    @property
    def version(self) -> str:
        """Return no version: a run has one history."""
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> Path:
        """Return the file."""
        return self.path

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Leave the configuration out: it is in ``results.json``."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one line."""
        line = {"step": step} | {name: float(value) for name, value in metrics.items()}
        append_line(self.path, line)


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return one dict a step, steps ascending: ``step`` and the metrics logged there.

    A missing file is an empty history. A step that stands twice (trained again after a kill) has
    the later values. Lines that a kill cut off, and values that are no numbers, are left out.
    """
    steps: dict[int, dict[str, Any]] = {}
    for record in read_lines(path):
        step = record.get("step")
        if type(step) is int:
            numbers = {key: v for key, v in record.items() if type(v) in (int, float)}
            steps.setdefault(step, {}).update(numbers)
    return [steps[step] for step in sorted(steps)]


def series(history: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric, where it was logged."""
    points = [(r["step"], r[metric]) for r in history if isinstance(r.get(metric), int | float)]
    return [step for step, _ in points], [value for _, value in points]
