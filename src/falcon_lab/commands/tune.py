"""``falcon-lab tune``: the tree that fits a drafter and this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from falcon_lab.config.schema import Experiment
from falcon_lab.measure.results import write_results
from falcon_lab.studies.tune.fragment import write_fragment
from falcon_lab.studies.tune.report import format_tune, write_plots
from falcon_lab.studies.tune.stage import Limits, tune

YAML, JSON = "tuned.yaml", "tune.json"


def tune_tree(
    experiment: Experiment, limits: Limits, folder: Path, announce: Callable[[str], None]
) -> None:
    """Tune, print the tables, and write the tree, the results and the plots into a folder."""
    results = tune(experiment, limits, announce)
    click.echo(format_tune(results))
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder / JSON, results)
    write_plots(folder, results)
    written = write_fragment(folder / YAML, results)
    click.echo(f"\nthe tree: {written}; tables and answers: {folder / JSON}")
