"""A Lightning training that can be killed at any moment: Trainer, checkpoints, learning rate.

Checkpoints are the newest one and the one before it. Each is written under a temporary name and
renamed, so that a file with the right name is complete; should it be damaged later, the one before
it is there.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from falcon_lab.bars import Bar
from falcon_lab.config.saved import CHECKPOINTS
from falcon_lab.config.schema import OptimizerConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_place, explain
from falcon_lab.trainer import make_trainer

REFRESH = 5
"""Steps between two refreshes of the progress bar."""
LAST, PREVIOUS, PARTIAL = "last.ckpt", "previous.ckpt", "partial.ckpt.tmp"


def train(
    module: LightningModule,
    datamodule: Any,
    trainer_args: Mapping[str, Any],
    folder: Path,
    logger: Any = None,
    checkpoint_every: int = 50,
    callbacks: Sequence[Callback] = (),
    begin: Callable[[], None] | None = None,
) -> Trainer:
    """Train to the end, from the newest checkpoint in ``folder/checkpoints`` if there is one.

    Args:
        module: what is trained.
        datamodule: its batches.
        trainer_args: arguments of ``lightning.Trainer``.
        folder: the run's folder.
        logger: Lightning logger, or None.
        checkpoint_every: optimiser steps between checkpoints.
        callbacks: further callbacks.
        begin: is called before a training that starts afresh.

    Raises:
        FalconLabError: no checkpoint can be read or written, the training diverged, or another
            process of it is gone.
    """
    checkpoints = folder / CHECKPOINTS
    resume = find_checkpoint(checkpoints, module)
    if resume is None and begin is not None:
        begin()
    bar = [TrainingBar()] if trainer_args.get("enable_progress_bar", True) else []
    trainer = make_trainer(
        trainer_args,
        folder,
        logger=logger,
        callbacks=[*bar, *callbacks, KeepLastTwo(checkpoints, checkpoint_every), KeepSigterm()],
    )
    try:
        trainer.fit(
            module, datamodule=datamodule, ckpt_path=None if resume is None else str(resume)
        )
    except BaseException as error:
        end_workers(trainer)
        if peer_is_gone(error):
            raise FalconLabError(
                "another process of the training has ended or cannot be reached, and its own "
                "output says why; when all are started again, the training goes on from its last "
                "checkpoint"
            ) from error
        raise
    return trainer


def peer_is_gone(error: BaseException) -> bool:
    """Return whether an error says that another process of a training left, and nothing else."""
    if isinstance(error, torch.distributed.DistNetworkError | torch.distributed.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in LEFT)


LEFT = ("gloo/transport/", "remote process exited")
"""Of what gloo and NCCL say of a lost connection, in errors without a type of their own."""


# --- signals and other processes ------------------------------------------------------------------


class KeepSigterm(Callback):
    """Leaves SIGTERM with whoever had it before the training.

    Lightning's own handler finishes the step and exits with 0, as if all had been trained; in a
    distributed training it waits for a collective that the others may never reach.
    """

    def __init__(self) -> None:
        self._before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo what Lightning has just registered; it restores nothing else at its end."""
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread and self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    on_sanity_check_start = on_train_start


def end_workers(trainer: Trainer) -> None:
    """Kill the processes that a distributed training started: they wait for one that has failed.

    They hold no lock and write no file.
    """
    launcher = trainer.strategy.launcher
    if launcher is not None:
        launcher.kill(signal.SIGKILL)
        # Lightning's observer would kill this process too, before it has said why it ends.
        getattr(launcher, "procs", []).clear()


# --- optimiser and learning rate ------------------------------------------------------------------


def make_optimizer(
    weights: Sequence[nn.Parameter], config: OptimizerConfig, max_steps: int
) -> dict[str, Any]:
    """Return AdamW and its schedule, as Lightning's ``configure_optimizers`` does."""
    optimizer = AdamW(
        weights,
        lr=config.lr,
        betas=cast(tuple[float, float], tuple(config.betas)),
        weight_decay=config.weight_decay,
    )
    return scheduled(optimizer, lambda step: lr_factor(step, max_steps, config))


def scheduled(optimizer: Optimizer, factor: Callable[[int], float]) -> dict[str, Any]:
    """Return an optimiser whose learning rate is multiplied by ``factor(step)``, for Lightning."""
    schedule = LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lr_factor(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """Return the share of the learning rate: linear warm-up, then cosine to ``final_lr``."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decay = max(1, max_steps - config.warmup_steps)
    return cosine((step - config.warmup_steps) / decay, config.final_lr)


def cosine(progress: float, final: float) -> float:
    """Return 1 at ``progress`` 0, ``final`` from 1 on, and half a cosine in between."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


# --- progress bar ---------------------------------------------------------------------------------


class TrainingBar(TQDMProgressBar):
    """Lightning's bar as ours: no version of the logger, and no epoch where steps govern."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=REFRESH)

    def init_train_tqdm(self) -> Any:
        """Return the bar of the training."""
        return self._bar(self.train_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Return the bar of one validation."""
        return self._bar(self.validation_description, leave=False, position=1)

    def init_sanity_tqdm(self) -> Any:
        """Return the bar of the validation before the training."""
        return self._bar(self.sanity_check_description, leave=False)

    def _bar(self, description: str, **options: Any) -> Bar:
        return Bar(
            desc=description,
            disable=self.is_disabled,
            dynamic_ncols=True,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    def on_train_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Show the bar; inside an epoch that is resumed, Lightning starts no epoch."""
        super().on_train_start(trainer, *arguments)
        self._begin(trainer)

    def on_train_epoch_start(self, trainer: Trainer, *arguments: Any) -> None:
        """Reset the bar; where steps govern, it is the whole training."""
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        """Start the bar's clock, with the batches behind it that a checkpoint has seen."""
        loop, bar = trainer.fit_loop, self.train_progress_bar
        seen = loop.epoch_loop.batch_progress.current.ready if loop.restarting else 0
        bar.reset()
        bar.initial = bar.n = seen if seen < trainer.num_training_batches else 0
        if trainer.max_epochs == -1:
            steps = trainer.max_steps - trainer.global_step
            bar.total = bar.n + steps * trainer.accumulate_grad_batches
            bar.set_description("Training")
        else:
            bar.total = trainer.num_training_batches
            bar.set_description(f"Epoch {trainer.current_epoch}")

    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the values that stand behind the bar."""
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        return shown


# --- checkpoints ----------------------------------------------------------------------------------


class KeepLastTwo(Checkpoint):
    """Saves a checkpoint every few optimiser steps and at the end.

    Args:
        folder: where the checkpoints go.
        every: steps between them.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self._saved = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the step resumed from, which need not be saved again."""
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
            raise FalconLabError(
                f"step {trainer.global_step}: {explain(error, partial)}; {self._earlier()}"
            ) from error
        finally:
            if trainer.is_global_zero:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
        self._saved = trainer.global_step

    def _earlier(self) -> str:
        kept = any((self.folder / name).exists() for name in (LAST, PREVIOUS))
        return "the checkpoint before it is kept" if kept else "there is no checkpoint before it"


def _rotate(folder: Path) -> None:
    """Rename the three files; a kill between the two renames leaves ``previous.ckpt`` complete."""
    if (folder / LAST).exists():
        (folder / LAST).replace(folder / PREVIOUS)
    (folder / PARTIAL).replace(folder / LAST)


def find_checkpoint(folder: Path, module: nn.Module | None = None) -> Path | None:
    """Return the newest checkpoint that can be used, or None where training starts afresh.

    Args:
        folder: of the checkpoints.
        module: what is trained; None takes any checkpoint that can be read.

    Raises:
        FalconLabError: there are checkpoints and none can be used, or none could be written.
    """
    refused: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / name
        check_place(path, folder=False)
        if not path.exists():
            continue
        if not (reason := _unusable(path, module)):
            if refused:
                rank_zero_warn(f"{refused[0]}; going on from {path}")
            return path
        refused.append(f"{path} {reason}")
    if refused:
        raise FalconLabError(
            f"{refused[0]} and there is no earlier checkpoint to resume from; delete "
            f"{folder} to train from the start"
        )
    return None


PARTS = {
    "state_dict": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": dict,
    "global_step": int,
    "epoch": int,
    "pytorch-lightning_version": str,
}
"""What a checkpoint of Lightning's has, and of which type."""


def _unusable(path: Path, module: nn.Module | None) -> str:
    """Return why a training cannot go on from a checkpoint; empty where it can."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # a damaged archive may raise anything
        return "is damaged"
    if module is None:
        return ""
    found = found if isinstance(found, dict) else {}
    if any(not isinstance(found.get(key), kind) for key, kind in PARTS.items()):
        return "is no checkpoint of a training"
    expected, state = module.state_dict(), found["state_dict"]
    if state.keys() != expected.keys():
        return "is of another training: its weights have other names"
    for name, place in expected.items():
        if getattr(state[name], "shape", None) != place.shape:
            return f"is of another training: {name} has another shape"
    return ""
