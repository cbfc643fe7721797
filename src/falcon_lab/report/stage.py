"""The report stage of a run: everything that is shown and shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import Experiment
from falcon_lab.drafters.saved import CARD, read_config
from falcon_lab.files import write_atomically
from falcon_lab.history import read_history
from falcon_lab.report.card import drafter_card
from falcon_lab.report.report import write_report
from falcon_lab.report.tracking import Tracking


def write_everything(
    experiment: Experiment,
    results: dict[str, Any],
    folder: Path,
    *,
    drafter: Path | None,
    tracking: Tracking,
    announce: Callable[[str], None],
) -> None:
    """Write report.html and the drafter's card, log to W&B, and name what was written.

    ``results.json`` is written when the evaluation ends, so that nothing measured is lost.

    Args:
        experiment: what was run.
        results: content of ``results.json``.
        folder: of the run.
        drafter: folder of the run's own drafter; None when it trained none.
        tracking: the run's loggers.
        announce: is called with one line for the user at a time.
    """
    shown = []
    if experiment.report.html:
        history = read_history(tracking.history)
        report = write_report(folder, results, history, results["trees"])
        shown.append(f"report   {report}")
    if drafter is not None:
        write_atomically(drafter / CARD, drafter_card(results, read_config(drafter)))
        shown.append(f"drafter  {drafter}")
        tracking.log_drafter(
            drafter,
            head=experiment.drafter["name"],
            target=experiment.target.name,
            metadata={"target": results["target"], "versions": results["versions"]},
        )
    tracking.log_results(results, results["trees"])
    if offline := tracking.offline_folder:
        shown.append(f"W&B      {offline}  (send it with: wandb sync {offline})")
    announce("\n".join(shown))
