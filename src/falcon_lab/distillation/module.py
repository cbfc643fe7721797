"""The one LightningModule: a frozen target teaches a drafter, whatever its head.

A step is a teacher pass, [a glance pass without gradient], a student pass, the objective.

Shapes: B batch, T tokens, R prediction rows, R' rows that count, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from falcon_lab.data.batch import Batch
from falcon_lab.distillation import metrics
from falcon_lab.distillation.labelling import (
    Labels,
    drafter_inputs,
    label_rows,
    repeated,
    with_own_features,
)
from falcon_lab.distillation.randomness import derive_seed, generator_for, seeded_dropout
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
from falcon_lab.schema import DistillationConfig, OptimizerConfig

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

    # --- training ---------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch; its loss is a mean over the rows of all processes."""
        read = batch.tokens.numel()
        batch, features = repeated(batch, self._teach(batch), self.config.repeats)
        ratio = self.schedule.ratio(self.global_step / max(1, self.max_steps))
        reveal: Reveal | None = None
        seen = features
        if ratio > 0 or self.config.own_features > 0:
            with torch.no_grad():
                first = self._study(batch, features)
                seen = self._mix(batch, features, first)
                reveal = self._glance(batch, features, first, ratio) if ratio > 0 else None
        prediction = self._study(batch, seen, reveal)
        labels = label_rows(batch, features, prediction)
        valid = labels.valid
        if reveal is not None and not self.schedule.keep_revealed_in_loss:
            valid = valid & ~reveal.mask
        rows = self._compare(prediction, labels, valid, self._generator(batch, "objective"))
        loss, tally = self._evaluate(rows, "train")
        where = metrics.places(prediction, valid, self.drafter.block)
        metrics.add_by_position(tally, "train/position_{}/accuracy", metrics.agreement(rows), where)
        shown = 0 if reveal is None else reveal.mask.sum()
        tally.add_sum("train/revealed", shown, 1)
        tally.add_sum("tokens", read, 1)
        reduced = tally.reduced()
        self._log_step(reduced, ratio)
        # DDP averages the gradients of its processes; this makes it the mean over all their rows.
        return loss * (self.trainer.world_size / max(1.0, reduced["train/loss"][1]))

    def _mix(self, batch: Batch, features: Tensor, first: Prediction) -> Tensor:
        """The student's input features: some of them its own, where the experiment asks for it."""
        share = self.config.own_features
        if not share:
            return features
        valid = label_rows(batch, features, first).valid
        return with_own_features(features, first, valid, share, self._generator(batch, "own"))

    def _glance(
        self, batch: Batch, features: Tensor, prediction: Prediction, ratio: float
    ) -> Reveal:
        """See where the student's first pass is wrong, and choose what to show it."""
        labels = label_rows(batch, features, prediction)
        rows = self._compare(prediction, labels, labels.valid, self._generator(batch, "glance"))
        wrong = torch.zeros_like(labels.valid)
        wrong[labels.valid] = ~metrics.agreement(rows)
        mask = self.schedule.reveal(
            GlanceRows(wrong, labels.valid, prediction.slot, prediction.group, self.drafter.block),
            ratio,
            self._generator(batch, "reveal"),
        )
        tokens = labels.tokens
        if self.schedule.token_source == "target":
            tokens = torch.zeros_like(labels.tokens)
            tokens[labels.valid] = rows.teacher_logits.argmax(-1)
        return Reveal(mask & labels.valid, tokens, labels.features)

    def _log_step(self, reduced: dict[str, tuple[float, float]], ratio: float) -> None:
        tokens, _ = reduced.pop("tokens")
        values = metrics.means(reduced)
        self._refuse_bad("loss", values.get("train/loss", 0.0))
        values["train/revealed"] = reduced["train/revealed"][0]  # all processes together
        values["train/glance_ratio"] = ratio
        optimizers = self.trainer.optimizers
        values["train/lr"] = optimizers[0].param_groups[0]["lr"]
        now, before = perf_counter(), self._step_started
        self._step_started = now
        if before is not None:
            values["train/tokens_per_second"] = tokens / (now - before)
        loss = values.pop("train/loss", 0.0)
        self.log("train/loss", loss, prog_bar=True, rank_zero_only=True, batch_size=1)
        self.log_dict(values, rank_zero_only=True, batch_size=1)

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
        features = self._teach(batch)
        generators = (self._generator(batch, "noise"), generator_for("validation", batch_idx))
        prediction = self.drafter(drafter_inputs(batch, features, 0.0, generators))
        labels = label_rows(batch, features, prediction)
        rows = self._compare(prediction, labels, labels.valid, self._generator(batch, "labels"))
        where = metrics.places(prediction, labels.valid, self.drafter.block)
        _, tally = self._evaluate(rows, "val", self._validation)
        agree, accept = metrics.agreement(rows), metrics.overlap(rows)
        tally.add("val/accept_rate", accept)
        metrics.add_by_position(tally, "val/position_{}/accept_rate", accept, where)
        metrics.add_by_position(tally, "val/position_{}/accuracy", agree, where)
        greedy, sampled = (metrics.expected_length(x, where) for x in (agree, accept))
        tally.add("val/expected_accept_length", greedy)
        tally.add("val/expected_accept_length_sampled", sampled)

    def on_validation_epoch_end(self) -> None:
        """Log means over all batches of all processes."""
        assert self._validation is not None
        values = metrics.means(self._validation.reduced())
        self.log_dict(values, rank_zero_only=True, batch_size=1)
        self._step_started = None  # validation is not training time

    # --- what both share --------------------------------------------------------------------

    @torch.no_grad()
    def _teach(self, batch: Batch) -> Tensor:
        """Features ``[B, T, H]``, in the target's own precision or from the store."""
        if batch.features is not None:
            return batch.features
        with torch.autocast(self.device.type, enabled=False):
            return self.target.teacher(batch.tokens, batch.documents, batch.positions)

    def _study(self, batch: Batch, features: Tensor, reveal: Reveal | None = None) -> Prediction:
        """A student pass; the same noise, block phases and dropout mask for one batch."""
        generators = (self._generator(batch, "noise"), self._generator(batch, "drafter"))
        inputs: DrafterInputs = drafter_inputs(batch, features, self.config.noise, generators)
        with seeded_dropout(derive_seed(*self._parts(batch, "dropout")), self.device):
            return self.drafter(inputs, reveal)

    def _compare(
        self, prediction: Prediction, labels: Labels, valid: Tensor, generator: torch.Generator
    ) -> LabelledRows:
        """Student and teacher on the rows of ``valid`` ``[B, R]``."""
        student = None if prediction.features is None else prediction.features[valid]
        teacher = labels.features[valid]
        if prediction.logits is not None:
            logits = prediction.logits[valid]
        else:
            assert student is not None, "a drafter predicts features or logits"
            logits = self.target.head(student.to(self.target.dtype))
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            truth = self.target.head(teacher.to(self.target.dtype))
        return LabelledRows(student, logits, teacher, truth, labels.tokens[valid], generator)

    def _evaluate(
        self, rows: LabelledRows, stage: str, tally: metrics.Tally | None = None
    ) -> tuple[Tensor, metrics.Tally]:
        """The summed loss, and a tally of it and its terms."""
        tally = metrics.Tally(self.device) if tally is None else tally
        terms = self.objective(rows)
        count = rows.teacher_logits.shape[0]
        loss = torch.zeros((), device=self.device)
        for name, weight in self.objective.weights.items():
            loss = loss + weight * terms[name].sum()
            tally.add(f"{stage}/loss/{name}", terms[name])
        tally.add_sum(f"{stage}/loss", loss.detach(), count)
        return loss, tally

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
        """The target goes where the drafter is."""
        self.target.to(self.device)

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
        config = self.config.optimizer
        optimizer = torch.optim.AdamW(
            [p for p in self.drafter.parameters() if p.requires_grad],
            lr=config.lr,
            betas=cast(tuple[float, float], tuple(config.betas)),
            weight_decay=config.weight_decay,
        )
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, self.max_steps, config))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def lr_factor(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """Share of the learning rate at ``step``: linear warm-up, then cosine to ``final_lr``."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decay = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
