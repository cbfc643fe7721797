"""``falcon-lab evaluate DIR``: measure a saved drafter, or a run's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from falcon_lab import experiment


def evaluate_folder(
    folder: Path, overrides: Sequence[str], announce: Callable[[str], None]
) -> None:
    """Measure the drafter in ``folder``, or in the run that ``folder`` holds."""
    experiment.evaluate_saved(folder, overrides, announce=announce)
