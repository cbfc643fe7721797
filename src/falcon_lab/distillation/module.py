"""The one LightningModule: a frozen target teaches a drafter, whatever its head.

A step is a teacher pass, [a glance pass without gradient], a student pass, the objective.

Shapes: B batch, T tokens, R prediction rows, R' rows that count, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from falcon_lab.data.batch import Batch
from falcon_lab.distillation import metrics
from falcon_lab.distillation.comparison import StudentRows, Teacher, rows_at_once
from falcon_lab.distillation.compiling import CompilesTraining
from falcon_lab.distillation.labelling import (
    Labels,
    drafter_inputs,
    label_rows,
    repeated,
    with_own_features,
)
from falcon_lab.distillation.losses import RowLoss
from falcon_lab.distillation.optimizing import make_optimizer
from falcon_lab.distillation.randomness import derive_seed, generator_for, seeded_dropout
from falcon_lab.distillation.timing import StepClock
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import (
    DrafterInputs,
    GlanceRows,
    GlancingSchedule,
    LabelledRows,
    Objective,
    Prediction,
    Reveal,
    TrainableDrafter,
)
from falcon_lab.schema import DistillationConfig

if TYPE_CHECKING:
    from falcon_lab.targets.target import Target


class Distillation(LightningModule):
    """Trains a drafter. The target is neither trained, nor saved, nor wrapped.

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
        self.save_hyperparameters(dict(hyperparameters or {}), logger=False)
        self.target = target
        self.drafter: Any = drafter
        self.objective = objective
        self.schedule = schedule
        self.config = config
        self.seed = seed
        self.max_steps = max_steps
        self._validation: metrics.Tally | None = None
        self._step_started: float | None = None
        self._clock = StepClock()
        self._logged = False  # whether Lightning hands this step's values on

    # --- training ---------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """The batch is there: what was waited for it is known."""
        every = getattr(self.trainer, "log_every_n_steps", 0)  # Lightning sets it undeclared
        self._logged = bool(every) and (self.global_step + 1) % every == 0
        self._clock.begin(self.device, wanted=self._logged)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch; its loss is a mean over the rows of all processes."""
        clock, read = self._clock, batch.tokens.numel()
        teacher = self._teach(batch)
        clock.lap("teacher")
        batch, features = repeated(batch, teacher.features, self.config.repeats)
        inputs = self._inputs(batch, features, self.config.noise)
        ratio = self.schedule.ratio(self.global_step / max(1, self.max_steps))
        labels: Labels | None = None
        reveal: Reveal | None = None
        if ratio > 0 or self.config.own_features > 0:
            with torch.no_grad():
                first = self._study(batch, inputs)
                labels = label_rows(batch, first)
                inputs = self._mix(batch, features, first, labels, inputs)
                if ratio > 0:
                    reveal = self._glance(batch, teacher, first, labels, ratio)
            clock.lap("glance")
        prediction = self._study(batch, inputs, reveal)
        clock.lap("student")
        # The rows of both passes are the same, and so are their labels.
        labels = label_rows(batch, prediction) if labels is None else labels
        if reveal is not None and not self.schedule.keep_revealed_in_loss:
            labels = labels._replace(valid=labels.valid & ~reveal.mask)
        loss, tally = self._lose(batch, teacher, prediction, labels)
        tally.add_sum("train/revealed", 0 if reveal is None else reveal.mask.sum(), 1)
        tally.add_sum("tokens", read, 1)
        reduced = tally.reduced()
        self._log_step(reduced, ratio)
        # DDP averages the gradients of its processes; this makes it the mean over all their rows.
        loss = loss * (self.trainer.world_size / max(1.0, reduced["train/loss"][1]))
        clock.lap("loss")
        return loss

    def _mix(
        self,
        batch: Batch,
        features: Tensor,
        first: Prediction,
        labels: Labels,
        inputs: DrafterInputs,
    ) -> DrafterInputs:
        """The second pass's inputs: some features its own, where the experiment asks for it."""
        share = self.config.own_features
        if not share:
            return inputs
        generator = self._generator(batch, "own")
        mixed = with_own_features(features, first, labels.valid, share, generator)
        return self._inputs(batch, mixed, self.config.noise)

    def _glance(
        self, batch: Batch, teacher: Teacher, first: Prediction, labels: Labels, ratio: float
    ) -> Reveal:
        """See where the student's first pass is wrong, and choose what to show it."""
        rows = StudentRows.of(first, labels, teacher.batch.tokens.shape)
        parts = rows.parts(teacher.rows)
        drafted = torch.cat([teacher.student_logits(part).argmax(-1) for part in parts])
        right = teacher.choices()[rows.places]
        wrong = torch.zeros_like(labels.valid)
        wrong[rows.index] = drafted != right
        mask = self.schedule.reveal(
            GlanceRows(wrong, labels.valid, first.slot, first.group, self.drafter.block),
            ratio,
            self._generator(batch, "reveal"),
        )
        tokens = labels.tokens
        if self.schedule.token_source == "target":
            tokens = torch.zeros_like(labels.tokens)
            tokens[rows.index] = right
        return Reveal(mask & labels.valid, tokens, labels.features(teacher.features))

    def _lose(
        self, batch: Batch, teacher: Teacher, prediction: Prediction, labels: Labels
    ) -> tuple[Tensor, metrics.Tally]:
        """The summed loss over the rows that count, and a tally of it and its terms."""
        tally = metrics.Tally(self.device)
        rows = StudentRows.of(prediction, labels, teacher.batch.tokens.shape)
        agree: list[Tensor] = []

        def look(part: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._count(tally, "train", terms)
            if self._logged:
                agree.append(metrics.agreement(part))

        generator = self._generator(batch, "objective")
        loss = RowLoss(self.objective, teacher, generator, look)(rows)
        tally.add_sum("train/loss", loss.detach(), len(rows))
        if agree:
            where = metrics.places(prediction, labels.valid, self.drafter.block, rows.index)
            metrics.add_by_position(tally, "train/position_{}/accuracy", torch.cat(agree), where)
        return loss, tally

    def _log_step(self, reduced: dict[str, tuple[float, float]], ratio: float) -> None:
        tokens, _ = reduced.pop("tokens")
        values = metrics.means(reduced)
        loss = values.pop("train/loss", 0.0)
        self._refuse_bad("loss", loss)
        self.log("train/loss", loss, prog_bar=True, rank_zero_only=True, batch_size=1)
        now, before = perf_counter(), self._step_started
        self._step_started = now
        if not self._logged:
            return
        values["train/revealed"] = reduced["train/revealed"][0]  # all processes together
        values["train/glance_ratio"] = ratio
        values["train/lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        if before is not None:
            values["train/tokens_per_second"] = tokens / (now - before)
        self.log_dict(values, rank_zero_only=True, batch_size=1)

    def on_after_backward(self) -> None:
        """The gradient is there."""
        self._clock.lap("backward")

    def optimizer_step(self, *arguments: Any, **settings: Any) -> None:
        """Lightning's: the closure with everything above, then the optimiser's own work."""
        super().optimizer_step(*arguments, **settings)
        self._clock.lap("optimizer")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Log where the time went; what comes next is waiting for data."""
        if self._logged:
            values = {f"train/time/{part}": s for part, s in self._clock.seconds.items()}
            self.log_dict(values, rank_zero_only=True, batch_size=1)
        self._clock.mark()

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
        tally = self._validation
        teacher = self._teach(batch)
        inputs = self._inputs(batch, teacher.features, 0.0)
        seeded = replace(inputs, generator=generator_for("validation", batch_idx))
        prediction = self.drafter(seeded)
        labels = label_rows(batch, prediction)
        rows = StudentRows.of(prediction, labels, batch.tokens.shape)
        agree, accept = [], []

        def look(part: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._count(tally, "val", terms)
            agree.append(metrics.agreement(part))
            accept.append(metrics.overlap(part))

        loss = RowLoss(self.objective, teacher, self._generator(batch, "labels"), look)(rows)
        tally.add_sum("val/loss", loss, len(rows))
        where = metrics.places(prediction, labels.valid, self.drafter.block, rows.index)
        metrics.add_drafted(tally, torch.cat(agree), torch.cat(accept), where)

    def on_validation_epoch_end(self) -> None:
        """Log means over all batches of all processes."""
        assert self._validation is not None
        values = metrics.means(self._validation.reduced())
        self.log_dict(values, rank_zero_only=True, batch_size=1)
        self._step_started = None  # validation is not training time
        self._clock.mark()

    # --- what both share --------------------------------------------------------------------

    def _teach(self, batch: Batch) -> Teacher:
        """The teacher pass, in the target's own precision; or features from the store."""
        features = batch.features
        if features is None:
            with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
                features = self.target.teacher(batch.tokens, batch.documents, batch.positions)
            features = features.clone()  # autograd saves no tensor of inference mode
        rows = rows_at_once(self.target.vocab_size, self.config.logits_mib)
        return Teacher(self.target, batch, features, rows)

    def _inputs(self, batch: Batch, features: Tensor, noise: float) -> DrafterInputs:
        generators = (self._generator(batch, "noise"), self._generator(batch, "drafter"))
        return drafter_inputs(batch, features, noise, generators)

    def _study(
        self, batch: Batch, inputs: DrafterInputs, reveal: Reveal | None = None
    ) -> Prediction:
        """A student pass; the same noise, block phases and dropout mask for one batch."""
        inputs = replace(inputs, generator=self._generator(batch, "drafter"))
        with seeded_dropout(derive_seed(*self._parts(batch, "dropout")), self.device):
            return self.drafter(inputs, reveal)

    def _count(self, tally: metrics.Tally, stage: str, terms: dict[str, Tensor]) -> None:
        for name in self.objective.weights:
            tally.add(f"{stage}/loss/{name}", terms[name])

    def _parts(self, batch: Batch, purpose: str) -> tuple[int | str, ...]:
        return self.seed, int(batch.index), self.global_rank, purpose

    def _generator(self, batch: Batch, purpose: str) -> torch.Generator:
        return generator_for(*self._parts(batch, purpose))

    # --- Lightning --------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Training starts in training mode, whatever mode the drafter was handed over in."""
        if stage == "fit":
            self.drafter.train()

    def on_fit_start(self) -> None:
        """The target goes where the drafter is; what is to be compiled is told so."""
        self.target.to(self.device)
        if self.config.compile:
            if not isinstance(self.drafter, CompilesTraining):
                raise FalconLabError(
                    f"distillation.compile: {type(self.drafter).__name__} does not say what of it "
                    "can be compiled (compile_training); set distillation.compile=false"
                )
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
