"""One batch, taught or examined: what a step does, whoever runs it.

    teach    one forward pass of the target              → features (its logits where asked for)
    glance   a student pass without gradient              → where it is wrong → what it is shown
    study    the student pass that is learnt from
    loss     student and target, a few rows at a time; of all rows, or of those that the schedule
             chooses

Both student passes have the same noise, block phases and dropout mask, and so the same rows and
labels, which are found once. With ``distillation.unroll`` the student goes on from the pass that is
learnt from (``Drafter.unroll``), and further passes are learnt from too.

Shapes: B batch, T tokens, R prediction rows, R' rows that count, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.config.schema import DistillationConfig
from falcon_lab.data.packing import Batch
from falcon_lab.distill import metrics
from falcon_lab.distill.labels import (
    Labels,
    drafter_inputs,
    label_rows,
    repeated,
    with_own_features,
)
from falcon_lab.distill.loss import RowLoss, StudentRows, Teacher, rows_at_once
from falcon_lab.distill.randomness import derive_seed, generator_for, seeded_dropout
from falcon_lab.distill.timing import StepClock
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    DrafterInputs,
    GlanceRows,
    GlancingSchedule,
    LabelledRows,
    Objective,
    Prediction,
    Reveal,
)
from falcon_lab.model.target import NOT_STORED

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


@dataclass(frozen=True)
class Lesson:
    """A teacher, a student and a batch.

    Attributes:
        target: the frozen teacher.
        drafter: the student.
        objective: what it is asked for.
        schedule: what it is shown.
        config: noise, repeats, memory.
        batch: packed documents.
        origin: what seeds everything random: the run's seed, the batch, the process.
        clock: is told what has been done.
    """

    target: Target
    drafter: Any
    objective: Objective
    schedule: GlancingSchedule
    config: DistillationConfig
    batch: Batch
    origin: tuple[int, ...]
    clock: StepClock = field(default_factory=StepClock)

    def learn(self, ratio: float, *, accuracy: bool = False) -> tuple[Tensor, metrics.Tally]:
        """The loss, summed over all rows that count, and a tally of it and its terms.

        Args:
            ratio: λ of the glancing; 0 leaves it out.
            accuracy: count right first candidates by place in the block too.
        """
        teacher = self._teach()
        self.clock.lap("teacher")
        batch, features = repeated(self.batch, teacher.features, self.config.repeats)
        inputs = self._inputs(batch, features, teacher.taps, self.config.noise)
        labels: Labels | None = None
        reveal: Reveal | None = None
        if ratio > 0 or self.config.own_features > 0:
            with torch.no_grad():
                first = self._study(inputs)
                labels = label_rows(batch, first)
                if self.config.own_features:
                    mixed = self._mix(features, first, labels)
                    inputs = self._inputs(batch, mixed, teacher.taps, self.config.noise)
                if ratio > 0:
                    reveal = self._glance(teacher, first, labels, ratio)
            self.clock.lap("glance")
        prediction, *later = self._study_on(inputs, reveal)
        self.clock.lap("student")
        labels = label_rows(batch, prediction) if labels is None else labels
        tally = metrics.Tally(self.batch.tokens.device)
        counted = self._counted(teacher, prediction, labels, reveal, tally)
        loss = self._compare(teacher, prediction, counted, tally, accuracy=accuracy)
        for number, further in enumerate(later, start=1):
            counted = self._counted(teacher, further, label_rows(batch, further), None, tally)
            loss = loss + self._compare(teacher, further, counted, tally, number, accuracy=accuracy)
        tally.add_sum("train/revealed", 0 if reveal is None else reveal.mask.sum(), 1)
        return loss, tally

    def examine(self, number: int, tally: metrics.Tally) -> None:
        """Count what the drafter would have drafted right, without noise or glancing.

        Args:
            number: of the batch, which seeds the block phases.
            tally: of the validation.
        """
        teacher = self._teach()
        inputs = self._inputs(self.batch, teacher.features, teacher.taps, 0.0)
        prediction = self.drafter(replace(inputs, generator=generator_for("validation", number)))
        labels = label_rows(self.batch, prediction)
        rows = StudentRows.of(prediction, labels, self.batch.tokens.shape)
        agree, accept = [], []

        def look(part: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._count(tally, "val", terms)
            agree.append(metrics.agreement(part))
            accept.append(metrics.overlap(part))

        loss = RowLoss(self.objective, teacher, self._generator("labels"), look)(rows)
        tally.add_sum("val/loss", loss, len(rows))
        where = metrics.places(prediction, labels.valid, self.drafter.block, rows.index)
        metrics.add_drafted(tally, torch.cat(agree), torch.cat(accept), where)

    # --- the teacher ------------------------------------------------------------------------

    def _teach(self) -> Teacher:
        """The teacher pass, in the target's own precision; or features from the store."""
        batch, features, taps = self.batch, self.batch.features, None
        if features is None:
            features, taps = self._read(batch)
        elif self.target.taps:
            raise FalconLabError(NOT_STORED)
        rows = rows_at_once(self.target.vocab_size, self.config.logits_mib)
        return Teacher(self.target, batch, features, rows, taps)

    def _read(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        packed = batch.tokens, batch.documents, batch.positions
        with torch.inference_mode(), torch.autocast(batch.tokens.device.type, enabled=False):
            if self.target.taps:
                features, taps = self.target.tapped_teacher(*packed)
            else:
                features, taps = self.target.teacher(*packed), None
        # Autograd saves no tensor of inference mode.
        return features.clone(), None if taps is None else taps.clone()

    # --- the student ------------------------------------------------------------------------

    def _inputs(
        self, batch: Batch, features: Tensor, taps: Tensor | None, noise: float
    ) -> DrafterInputs:
        generators = (self._generator("noise"), self._generator("drafter"))
        noise = noise if "features" in self.drafter.needs else 0.0
        return drafter_inputs(batch, features, noise, generators, taps)

    def _study(self, inputs: DrafterInputs) -> Prediction:
        """The first pass alone."""
        return self._study_on(inputs, None, passes=1)[0]

    def _study_on(
        self, inputs: DrafterInputs, reveal: Reveal | None, passes: int | None = None
    ) -> list[Prediction]:
        """The first pass and those that go on from it, ``passes`` or as many as are learnt from."""
        inputs = replace(inputs, generator=self._generator("drafter"))
        with seeded_dropout(derive_seed(*self.origin, "dropout"), inputs.tokens.device):
            if self.config.unroll == 1:
                return [self.drafter(inputs, reveal)]
            return list(islice(self.drafter.unroll(inputs, reveal), passes or self.config.unroll))

    def _mix(self, features: Tensor, first: Prediction, labels: Labels) -> Tensor:
        """Input features of which some are the student's own."""
        share, generator = self.config.own_features, self._generator("own")
        return with_own_features(features, first, labels.valid, share, generator)

    def _glance(self, teacher: Teacher, first: Prediction, labels: Labels, ratio: float) -> Reveal:
        """See where the first pass is wrong, and choose what to show."""
        rows, right = self._mark(teacher, first, labels)
        mask = self.schedule.reveal(rows, ratio, self._generator("reveal"))
        tokens = right if self.schedule.token_source == "target" else labels.tokens
        return Reveal(mask & labels.valid, tokens, labels.features(teacher.features))

    @torch.no_grad()
    def _mark(
        self, teacher: Teacher, prediction: Prediction, labels: Labels
    ) -> tuple[GlanceRows, Tensor]:
        """Where a student pass is wrong, and ``[B, R]`` long: what would have been right."""
        rows = StudentRows.of(prediction, labels, self.batch.tokens.shape)
        parts = rows.parts(teacher.rows)
        drafted = torch.cat([teacher.student_logits(part).argmax(-1) for part in parts])
        right, wrong = torch.zeros_like(labels.tokens), torch.zeros_like(labels.valid)
        right[rows.index] = teacher.choices()[rows.places]
        wrong[rows.index] = drafted != right[rows.index]
        where = prediction.slot, prediction.group, self.drafter.block
        return GlanceRows(wrong, labels.valid, *where), right

    def _counted(
        self,
        teacher: Teacher,
        prediction: Prediction,
        labels: Labels,
        reveal: Reveal | None,
        tally: metrics.Tally,
    ) -> Labels:
        """The labels of the rows that the schedule leaves in the loss; the share that it does."""
        valid = labels.valid
        if reveal is not None and not self.schedule.keep_revealed_in_loss:
            valid = valid & ~reveal.mask
        if self.schedule.chooses_rows:
            valid = valid & self.schedule.counts(self._mark(teacher, prediction, labels)[0])
            tally.add_sum("train/kept", valid.sum(), int(labels.valid.sum()))
        return labels._replace(valid=valid)

    # --- the loss ---------------------------------------------------------------------------

    def _compare(
        self,
        teacher: Teacher,
        prediction: Prediction,
        labels: Labels,
        tally: metrics.Tally,
        number: int = 0,
        *,
        accuracy: bool,
    ) -> Tensor:
        """The loss of pass ``number``, summed over its rows and weighted."""
        rows = StudentRows.of(prediction, labels, self.batch.tokens.shape)
        agree: list[Tensor] = []

        def look(part: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._count(tally, "train", terms)
            if accuracy:
                agree.append(metrics.agreement(part))

        purpose = f"objective{number}" if number else "objective"
        loss = RowLoss(self.objective, teacher, self._generator(purpose), look)(rows)
        weight = self.config.unroll_decay**number
        tally.add_sum("train/loss", weight * loss.detach(), weight * len(rows))
        if accuracy:
            where = metrics.places(prediction, labels.valid, self.drafter.block, rows.index)
            key = f"train/pass_{number + 1}/position_{{}}" if number else "train/position_{}"
            metrics.add_by_position(tally, f"{key}/accuracy", torch.cat(agree), where)
        return weight * loss

    def _count(self, tally: metrics.Tally, stage: str, terms: dict[str, Tensor]) -> None:
        for name in self.objective.weights:
            tally.add(f"{stage}/loss/{name}", terms[name])

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(*self.origin, purpose)
