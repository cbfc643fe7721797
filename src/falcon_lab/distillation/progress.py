"""The progress bar of a training that is one stream of steps, not epochs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

REFRESH = 5
"""Steps between two refreshes."""


class TrainingBar(TQDMProgressBar):
    """Lightning's bar, without an epoch number that means nothing and the logger's version."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=REFRESH)

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Begin anew; where steps govern, the bar is the whole training."""
        if trainer.max_epochs != -1:
            super().on_train_epoch_start(trainer, *arguments)
            return
        self.train_progress_bar.reset()
        self.train_progress_bar.total = self.total_train_batches
        self.train_progress_bar.set_description("Training")

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What stands behind the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown
