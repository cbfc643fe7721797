"""Runs the Trainer: progress, checkpoints, resuming, and a look at real decoding on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from falcon_lab.decoding.sampling import Sampling
from falcon_lab.distillation.checkpoints import KeepLastTwo, find_checkpoint
from falcon_lab.distillation.progress import TrainingBar
from falcon_lab.distillation.randomness import derive_seed

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.stopping import StopCondition

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
