"""The report stage of a run: everything that is shown and shared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from falcon_lab.drafters.saved import CARD, read_config
from falcon_lab.files import write_atomically
from falcon_lab.report.card import drafter_card
from falcon_lab.report.history import read_history
from falcon_lab.report.report import write_report

if TYPE_CHECKING:
    from falcon_lab.run import Run


def write_everything(current: Run) -> None:
    """report.html, the drafter's card and W&B; then say where they are.

    ``results.json`` is written when the evaluation ends, so that nothing measured is lost.
    """
    results = current.load_results()
    history = read_history(current.tracking.history)
    shown = []
    if current.experiment.report.html:
        report = write_report(current.folder, results, history, results["trees"])
        shown.append(f"report   {report}")
    if current.training_done:
        card = drafter_card(results, read_config(current.drafter_folder))
        write_atomically(current.drafter_folder / CARD, card)
        shown.append(f"drafter  {current.drafter_folder}")
        current.tracking.log_drafter(
            current.drafter_folder,
            head=current.experiment.drafter["name"],
            target=current.experiment.target.name,
            metadata={"target": results["target"], "versions": results["versions"]},
        )
    current.tracking.log_results(results, results["trees"])
    if folder := current.tracking.offline_folder:
        shown.append(f"W&B      {folder}  (send it with: wandb sync {folder})")
    current.announce("\n".join(shown))
