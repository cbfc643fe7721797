"""``falcon-lab run``: the experiment, or each of its variants with each of its seeds."""

from __future__ import annotations

from collections.abc import Callable

from falcon_lab import experiment
from falcon_lab.schema import Experiment


def run_all(everything: list[tuple[str, int, Experiment]], announce: Callable[[str], None]) -> None:
    """Run what ``falcon_lab.config.variants`` returned."""
    if len(everything) == 1:
        experiment.run(everything[0][2], announce=announce)
    else:
        experiment.run_variants(everything, announce=announce)
