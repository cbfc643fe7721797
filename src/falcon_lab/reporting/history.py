"""Training curves in the run folder: JSON lines that need no account and survive a kill."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from falcon_lab.json_lines import append_line


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
