"""The one LightningModule: a frozen target teaches a drafter, whatever its head.

What a step does with a batch is in ``step.py``; here is what Lightning asks for around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from falcon_lab.config.schema import DistillationConfig
from falcon_lab.data.packing import Batch
from falcon_lab.distill import metrics
from falcon_lab.distill.step import DistillationStep, StepClock
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Drafter, GlancingSchedule, Objective, TrainableDrafter
from falcon_lab.timing import Stopwatch
from falcon_lab.training import make_optimizer

if TYPE_CHECKING:
    from falcon_lab.model.target import Target
    from falcon_lab.model_parallel import Memory


class Distillation(LightningModule):
    """Trains a drafter. The target is neither trained, nor saved, nor wrapped.

    Attributes:
        clock: seconds of the parts of the step that was begun last.
        shared: what every process has of a target that they share, or None.
        chunk: rows of logits at a time; None: as ``config.logits_mib`` says.

    Args:
        target: the frozen teacher.
        drafter: one with weights, an ``nn.Module``.
        objective: the terms of the loss.
        schedule: of glancing.
        config: noise, repeats, unrolling, memory and optimiser.
        seed: of everything random, together with ``Batch.index`` and the process's rank.
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
        if config.least_squares:
            drafter.first_weights()  # is refused before there are data
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
        self.chunk: int | None = None
        self._logged = False  # whether Lightning hands this step's values on
        self._reached = False  # whether a step has taught anything yet
        self.shared: Memory | None = None
        self._sharded = False  # whether the processes divide the drafter, too

    # --- training ---------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Start the step's clock: the batch is there."""
        every = getattr(self.trainer, "log_every_n_steps", 0)  # Lightning sets it undeclared
        self._logged = bool(every) and (self.global_step + 1) % every == 0
        self.clock.begin(self.device, wanted=self._logged)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch, a mean over the rows of all processes."""
        ratio = self.schedule.ratio(self.global_step / max(1, self.max_steps))
        loss, tally = self.step(batch).train(ratio, accuracy=self._logged)
        tally.add_sum("tokens", batch.tokens.numel(), 1)
        reduced = tally.reduced()
        self._log_step(reduced, ratio)
        # DDP averages the gradients of its processes; this makes it the mean over all their rows.
        loss = loss * (self.trainer.world_size / max(1.0, reduced["train/loss"][1]))
        self.clock.lap("loss")
        return loss

    def _log_step(self, reduced: dict[str, tuple[float, float]], ratio: float) -> None:
        copies = 1 if self.shared is None else self.shared.tensor  # processes with the same batch
        tokens = reduced.pop("tokens")[0] / copies
        values = metrics.means(reduced)
        loss = values.pop("train/loss", 0.0)
        self._refuse_bad("loss", loss)
        self.log("train/loss", loss, prog_bar=True, rank_zero_only=True, batch_size=1)
        seconds = self._step_watch.lap() if self._step_watch else None
        self._step_watch = self._step_watch or Stopwatch()
        if not self._logged:
            return
        values["train/revealed"] = reduced["train/revealed"][0] / copies  # of all processes
        values["train/glance_ratio"] = ratio
        values["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if seconds is not None:
            values["train/tokens_per_second"] = tokens / seconds
        self.log_dict(values, rank_zero_only=True, batch_size=1)

    def on_after_backward(self) -> None:
        """Time the backward pass."""
        self.clock.lap("backward")

    def optimizer_step(self, *arguments: Any, **settings: Any) -> None:
        """Run Lightning's closure with everything above, and time the optimiser's own work."""
        super().optimizer_step(*arguments, **settings)
        self.clock.lap("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log the seconds of the parts; the wait for the next batch starts here."""
        if self._logged:
            values = {f"train/time/{part}": s for part, s in self.clock.seconds.items()}
            self.log_dict(values, rank_zero_only=True, batch_size=1)
        self.clock.mark()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the gradient's norm; refuse one that is not finite."""
        if self.shared is not None and not self._sharded:
            from falcon_lab.model_parallel import average_gradients

            average_gradients(p for p in self.drafter.parameters() if p.requires_grad)
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        if gradients and not self._reached:
            self._reached = True
            warn_of_untaught(self.drafter, self.config.unroll)
        norm = float(_everywhere(nn.utils.get_total_norm(gradients)))
        if self.trainer.precision != "16-mixed":  # whose scaler skips such steps itself
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
        """Start a tally."""
        self._validation = metrics.Tally(self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Tally how well the drafter would have drafted, without noise or glancing."""
        assert self._validation is not None
        self.step(batch).validate(batch_idx, self._validation)

    def on_validation_epoch_end(self) -> None:
        """Log means over all batches of all processes."""
        assert self._validation is not None
        values = metrics.means(self._validation.reduced())
        self.log_dict(values, rank_zero_only=True, batch_size=1)
        self._step_watch = None  # validation is not training time
        self.clock.mark()

    def step(self, batch: Batch) -> DistillationStep:
        """Return the training or validation step of one batch."""
        return DistillationStep(
            self.target,
            self.drafter,
            self.objective,
            self.schedule,
            self.config,
            batch,
            (self.seed, int(batch.index), self._data_rank),
            self.clock,
            self.chunk,
        )

    @property
    def _data_rank(self) -> int:
        """Return this process's number among those with batches of their own."""
        if self.shared is None or self.device_mesh is None:
            return self.global_rank
        return self.device_mesh["data_parallel"].get_local_rank()

    # --- Lightning --------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Divide the target among the processes, where Lightning has arranged them for it."""
        if self.device_mesh is not None and self.shared is None:
            from falcon_lab.model_parallel import share_target

            self.shared = share_target(self.target, self.device_mesh)
            if getattr(self.trainer.strategy, "shards_drafter", False):
                from falcon_lab.model_parallel import shard_drafter

                self._sharded = True
                shard_drafter(self, ("training_step", "validation_step"), self.device_mesh)

    def gather(self) -> None:
        """Make the drafter whole in every process again, if it was divided among them."""
        if self._sharded:
            from falcon_lab.model_parallel import gather_drafter

            self._sharded = False
            gather_drafter(self, self.drafter)

    def setup(self, stage: str) -> None:
        """Put the drafter into training mode, whatever mode it was handed over in."""
        if stage == "fit":
            self.drafter.train()

    def on_fit_start(self) -> None:
        """Move the target to the drafter's device; compile the training pass if asked to."""
        self.target.to(self.device)
        if self.config.compile:
            self.drafter.compile_training()

    def on_validation_start(self) -> None:
        """Move the target to the drafter's device, for ``Trainer.validate``."""
        self.target.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store which target the drafter belongs to."""
        checkpoint["target_fingerprint"] = self.target.fingerprint

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another target."""
        trained_for = checkpoint.get("target_fingerprint")
        if trained_for != self.target.fingerprint:
            raise FalconLabError(
                f"the checkpoint belongs to a target with fingerprint {trained_for}, and "
                f"{self.target.name} has {self.target.fingerprint}; use another run folder"
            )

    def configure_optimizers(self) -> Any:
        """Return AdamW with warm-up and cosine decay."""
        weights = [p for p in self.drafter.parameters() if p.requires_grad]
        return make_optimizer(weights, self.config.optimizer, self.max_steps)


def _everywhere(number: Tensor) -> Tensor:
    """Return a number of which each process may have a part."""
    gathered: Tensor = number.full_tensor() if hasattr(number, "full_tensor") else number
    return gathered


def warn_of_untaught(drafter: Any, unroll: int) -> None:
    """Warn of weights that a step does not reach, as those of passes that training leaves out.

    Args:
        drafter: after a backward pass.
        unroll: passes of the training.
    """
    weights = drafter.named_parameters()
    without = [name for name, weight in weights if weight.requires_grad and weight.grad is None]
    if not without:
        return
    more = f" and {len(without) - 3} more" if len(without) > 3 else ""
    what = "take requires_grad from what is not to be trained"
    if drafter.unrolls:
        what = f"weights of later passes need more than distillation.unroll={unroll}; else {what}"
    rank_zero_warn(
        f"the first step does not reach {', '.join(without[:3])}{more} of "
        f"{type(drafter).__name__}, which stay as they began: {what}"
    )


def _check_unroll(drafter: Drafter, config: DistillationConfig) -> None:
    if config.unroll == 1:
        return
    if not drafter.unrolls:
        raise FalconLabError(
            f"distillation.unroll is {config.unroll}, and {type(drafter).__name__} cannot "
            "continue from its own predictions in training (unroll); set distillation.unroll=1"
        )
    if drafter.max_passes is not None and config.unroll > drafter.max_passes:
        raise FalconLabError(
            f"distillation.unroll is {config.unroll}, and a round of {type(drafter).__name__} has "
            f"{drafter.max_passes} passes; set distillation.unroll={drafter.max_passes}"
        )
    if config.compile:
        raise FalconLabError(
            "distillation.compile cannot compile unrolled training; set "
            "distillation.compile=false or distillation.unroll=1"
        )
