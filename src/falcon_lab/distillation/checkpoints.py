"""Checkpoints that a killed run resumes from: the newest, and the one before it.

A checkpoint is written under a temporary name and renamed, so that a file with the right name is
whole. Should it be damaged later, the one before it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn

from falcon_lab.errors import FalconLabError

LAST, PREVIOUS, PARTIAL = "last.ckpt", "previous.ckpt", "partial.ckpt.tmp"


class KeepLastTwo(Checkpoint):
    """Saves every few optimiser steps and at the end.

    Args:
        folder: where the checkpoints go.
        every: steps between them.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self._saved = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was resumed from need not be saved again."""
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after a step, never between the micro-batches of one: gradients are not saved."""
        step = trainer.global_step
        if self.every and step % self.every == 0 and step != self._saved:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the finished training."""
        if trainer.global_step != self._saved:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        partial = self.folder / PARTIAL
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            trainer.save_checkpoint(partial)
            if trainer.is_global_zero:
                _rotate(self.folder)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)
            raise FalconLabError(
                f"cannot write a checkpoint into {self.folder} at step {trainer.global_step} "
                f"({error}); make room and run the same command again, the earlier checkpoint "
                "is still there"
            ) from error
        self._saved = trainer.global_step


def _rotate(folder: Path) -> None:
    """Killed between the two renames, the folder has a whole ``previous.ckpt``."""
    if (folder / LAST).exists():
        (folder / LAST).replace(folder / PREVIOUS)
    (folder / PARTIAL).replace(folder / LAST)


def find_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that can be read, or None where training starts afresh.

    Raises:
        FalconLabError: there are checkpoints and none can be read.
    """
    damaged: list[Path] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        if not path.exists():
            continue
        if _readable(path):
            if damaged:
                rank_zero_warn(f"{damaged[0]} is damaged; going on from {path}")
            return path
        damaged.append(path)
    if damaged:
        raise FalconLabError(
            f"{damaged[0]} is damaged and there is no earlier checkpoint to go on from; delete "
            f"{folder} to train from the start"
        )
    return None


def _readable(path: Path) -> bool:
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # what a damaged archive raises is anyone's guess
        return False
    return True
