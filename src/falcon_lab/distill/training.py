"""The optimiser and its learning rate.

The progress bar of a training that is one stream of steps, not epochs.

Checkpoints that a killed run resumes from: the newest, and the one before it.

A checkpoint is written under a temporary name and renamed, so that a file with the right name is
whole. Should it be damaged later, the one before it is there.

Runs the Trainer: progress, checkpoints, resuming, and a look at real decoding on the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, TQDMProgressBar
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from falcon_lab.config.schema import OptimizerConfig
from falcon_lab.distill.randomness import derive_seed
from falcon_lab.errors import FalconLabError
from falcon_lab.sampling import Sampling

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.stopping import StopCondition


def make_optimizer(
    weights: Sequence[nn.Parameter], config: OptimizerConfig, max_steps: int
) -> dict[str, Any]:
    """AdamW and its schedule, as Lightning's ``configure_optimizers`` returns them."""
    optimizer = torch.optim.AdamW(
        weights,
        lr=config.lr,
        betas=cast(tuple[float, float], tuple(config.betas)),
        weight_decay=config.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, max_steps, config))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lr_factor(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """Share of the learning rate at ``step``: linear warm-up, then cosine to ``final_lr``."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decay = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


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


DEFAULTS = {"num_sanity_val_steps": 0, "enable_model_summary": False, "log_every_n_steps": 10}
"""What we would have differently from Lightning; ``trainer:`` overrides it."""


def train(
    module: LightningModule,
    datamodule: Any,
    trainer_args: Mapping[str, Any],
    folder: Path,
    logger: Any = None,
    checkpoint_every: int = 50,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Train to the end, from the newest checkpoint in ``folder/checkpoints`` if there is one.

    Args:
        module: what to train.
        datamodule: batches.
        trainer_args: arguments of ``lightning.Trainer``.
        folder: the run's folder.
        logger: Lightning logger, or None.
        checkpoint_every: optimiser steps between checkpoints.
        callbacks: more of them.

    Raises:
        FalconLabError: no checkpoint can be read or written, or training went astray.
    """
    checkpoints = folder / "checkpoints"
    resume = find_checkpoint(checkpoints)
    bar = [TrainingBar()] if trainer_args.get("enable_progress_bar", True) else []
    trainer = Trainer(
        **{**DEFAULTS, **trainer_args},
        default_root_dir=folder,
        logger=False if logger is None else logger,
        callbacks=[*bar, *callbacks, KeepLastTwo(checkpoints, checkpoint_every)],
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=None if resume is None else str(resume))
    return trainer


class DecodeProbe(Callback):
    """Decodes a few prompts every so many steps and logs ``decode/mean_accepted``.

    That is tokens per verification, the bonus token counted. The first process does it alone.

    Args:
        engine: with the drafter that is being trained.
        prompts: ``[P]`` long each, on any device.
        every: optimiser steps between two looks.
        max_new_tokens: length of an answer.
        stop: what ends an answer.
        sampling: how tokens are drawn.
        seed: of the draws.
    """

    def __init__(
        self,
        engine: SpeculativeEngine,
        prompts: Sequence[Tensor],
        *,
        every: int,
        max_new_tokens: int,
        stop: StopCondition,
        sampling: Sampling | None = None,
        seed: int = 0,
    ) -> None:
        self.engine, self.prompts, self.every = engine, prompts, every
        self.max_new_tokens, self.stop = max_new_tokens, stop
        self.sampling = sampling or Sampling()
        self.seed = seed
        self._looked_at = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look when a step is due."""
        step = trainer.global_step
        if not self.every or step % self.every or step == self._looked_at:
            return
        self._looked_at = step
        if trainer.is_global_zero and (mean := self.mean_accepted(pl_module, step)) is not None:
            for logger in trainer.loggers:  # ``log`` would repeat the value in later steps
                logger.log_metrics({"decode/mean_accepted": mean}, step=step - 1)

    def mean_accepted(self, module: LightningModule, step: int) -> float | None:
        """Tokens per verification over all prompts; None when nothing was verified."""
        import torch

        generator = torch.Generator(device=module.device)
        generator.manual_seed(derive_seed(self.seed, "decode", step))
        training = module.training
        module.eval()
        rounds = []
        for prompt in self.prompts:
            generation = self.engine.generate(
                prompt.to(module.device),
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                generator=generator,
                stop=self.stop,
            )
            rounds += generation.rounds
        module.train(training)
        if not rounds:
            return None
        return 1 + sum(done.accepted for done in rounds) / len(rounds)
