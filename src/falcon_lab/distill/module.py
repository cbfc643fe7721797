"""The one LightningModule: a frozen target teaches a drafter, whatever its head.

What a step does with a batch is in ``lesson.py``: a teacher pass, [a glance pass without gradient],
a student pass, the objective. Here is what Lightning asks for around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from falcon_lab.config.schema import DistillationConfig
from falcon_lab.data.packing import Batch
from falcon_lab.distill import metrics
from falcon_lab.distill.step import Lesson
from falcon_lab.distill.timing import StepClock
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Drafter, GlancingSchedule, Objective, TrainableDrafter
from falcon_lab.timing import Stopwatch
from falcon_lab.training import make_optimizer

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


class Distillation(LightningModule):
    """Trains a drafter. The target is neither trained, nor saved, nor wrapped.

    Attributes:
        clock: seconds of the parts of the step that was last begun.

    Args:
        target: the frozen teacher.
        drafter: an ``nn.Module`` that fulfils ``TrainableDrafter``.
        objective: what the student is asked for.
        schedule: what the student is shown.
        config: noise and optimiser.
        seed: of everything random; together with ``Batch.index`` and the process's rank.
        max_steps: optimiser steps of the whole training (learning rate and glancing follow it).
        hyperparameters: plain nested mapping to store in checkpoints.
    """

    def __init__(
        self,
        target: Target,
        drafter: TrainableDrafter,
        objective: Objective,
        schedule: GlancingSchedule,
        config: DistillationConfig,
        *,
        seed: int,
        max_steps: int,
        hyperparameters: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check_unroll(drafter, config)
        self.save_hyperparameters(dict(hyperparameters or {}), logger=False)
        self.target = target.tapped(drafter.taps)
        self.drafter: Any = drafter
        self.objective = objective
        self.schedule = schedule
        self.config = config
        self.seed = seed
        self.max_steps = max_steps
        self._validation: metrics.Tally | None = None
        self._step_watch: Stopwatch | None = None
        self.clock = StepClock()
        self._logged = False  # whether Lightning hands this step's values on

    # --- training ---------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """The batch is there: what was waited for it is known."""
        every = getattr(self.trainer, "log_every_n_steps", 0)  # Lightning sets it undeclared
        self._logged = bool(every) and (self.global_step + 1) % every == 0
        self.clock.begin(self.device, wanted=self._logged)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch; its loss is a mean over the rows of all processes."""
        ratio = self.schedule.ratio(self.global_step / max(1, self.max_steps))
        loss, tally = self.lesson(batch).learn(ratio, accuracy=self._logged)
        tally.add_sum("tokens", batch.tokens.numel(), 1)
        reduced = tally.reduced()
        self._log_step(reduced, ratio)
        # DDP averages the gradients of its processes; this makes it the mean over all their rows.
        loss = loss * (self.trainer.world_size / max(1.0, reduced["train/loss"][1]))
        self.clock.lap("loss")
        return loss

    def _log_step(self, reduced: dict[str, tuple[float, float]], ratio: float) -> None:
        tokens, _ = reduced.pop("tokens")
        values = metrics.means(reduced)
        loss = values.pop("train/loss", 0.0)
        self._refuse_bad("loss", loss)
        self.log("train/loss", loss, prog_bar=True, rank_zero_only=True, batch_size=1)
        seconds = self._step_watch.lap() if self._step_watch else None
        self._step_watch = self._step_watch or Stopwatch()
        if not self._logged:
            return
        values["train/revealed"] = reduced["train/revealed"][0]  # all processes together
        values["train/glance_ratio"] = ratio
        values["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if seconds is not None:
            values["train/tokens_per_second"] = tokens / seconds
        self.log_dict(values, rank_zero_only=True, batch_size=1)

    def on_after_backward(self) -> None:
        """The gradient is there."""
        self.clock.lap("backward")

    def optimizer_step(self, *arguments: Any, **settings: Any) -> None:
        """Lightning's: the closure with everything above, then the optimiser's own work."""
        super().optimizer_step(*arguments, **settings)
        self.clock.lap("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log where the time went; what comes next is waiting for data."""
        if self._logged:
            values = {f"train/time/{part}": s for part, s in self.clock.seconds.items()}
            self.log_dict(values, rank_zero_only=True, batch_size=1)
        self.clock.mark()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient's norm; refuse one that would spoil the weights."""
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if self.trainer.precision != "16-mixed":  # whose scaler skips such steps by itself
            self._refuse_bad("gradient", norm)
        self.log("train/grad_norm", norm, rank_zero_only=True, batch_size=1)

    def _refuse_bad(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise FalconLabError(
                f"the {what} is {value} at step {self.global_step}: training stopped, and the "
                "last good checkpoint is kept; try a lower distillation.optimizer.lr, or "
                "trainer.gradient_clip_val=0.5"
            )

    # --- validation -------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin to count."""
        self._validation = metrics.Tally(self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count what the drafter would have drafted right, without noise or glancing."""
        assert self._validation is not None
        self.lesson(batch).examine(batch_idx, self._validation)

    def on_validation_epoch_end(self) -> None:
        """Log means over all batches of all processes."""
        assert self._validation is not None
        values = metrics.means(self._validation.reduced())
        self.log_dict(values, rank_zero_only=True, batch_size=1)
        self._step_watch = None  # validation is not training time
        self.clock.mark()

    def lesson(self, batch: Batch) -> Lesson:
        """What training and validation make of a batch."""
        return Lesson(
            self.target,
            self.drafter,
            self.objective,
            self.schedule,
            self.config,
            batch,
            (self.seed, int(batch.index), self.global_rank),
            self.clock,
        )

    # --- Lightning --------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Training starts in training mode, whatever mode the drafter was handed over in."""
        if stage == "fit":
            self.drafter.train()

    def on_fit_start(self) -> None:
        """The target goes where the drafter is; what is to be compiled is told so."""
        self.target.to(self.device)
        if self.config.compile:
            self.drafter.compile_training()

    def on_validation_start(self) -> None:
        """As ``on_fit_start``, for ``Trainer.validate``."""
        self.target.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Note which target the drafter belongs to."""
        checkpoint["target_fingerprint"] = self.target.fingerprint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with another target."""
        trained_for = checkpoint.get("target_fingerprint")
        if trained_for != self.target.fingerprint:
            raise FalconLabError(
                f"the checkpoint belongs to a target with fingerprint {trained_for}, and "
                f"{self.target.name} has {self.target.fingerprint}; use another run folder"
            )

    def configure_optimizers(self) -> Any:
        """AdamW, warm-up, cosine."""
        weights = [p for p in self.drafter.parameters() if p.requires_grad]
        return make_optimizer(weights, self.config.optimizer, self.max_steps)


def _check_unroll(drafter: Drafter, config: DistillationConfig) -> None:
    if config.unroll == 1:
        return
    if not drafter.unrolls:
        raise FalconLabError(
            f"distillation.unroll is {config.unroll}, and {type(drafter).__name__} cannot go on "
            "from its own predictions in training (unroll); set distillation.unroll=1"
        )
    if config.compile:
        raise FalconLabError(
            "distillation.compile is for training passes that nothing goes on from; set "
            "distillation.compile=false or distillation.unroll=1"
        )
