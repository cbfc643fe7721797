"""Run one training step or validation step on one batch, without Lightning.

    teacher  one forward pass of the target               → features (its logits where needed)
    glance   a drafter pass without gradient              → where it is wrong → what is revealed
    student  the drafter pass with gradient; with ``distillation.unroll`` several, each continuing
             from the predictions of the one before
    loss     drafter and target, a chunk of rows at a time, over all rows or over those that the
             glancing schedule chooses

The glance pass and the student pass have the same noise, block phases and dropout mask, and so the
same rows and labels.

Shapes: B sequences, T tokens, R prediction rows, L tapped layers, H hidden.
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
from falcon_lab.distill.inputs import (
    derive_seed,
    drafter_inputs,
    generator_for,
    repeated,
    seeded_dropout,
    with_own_features,
)
from falcon_lab.distill.loss import ChunkedLoss, Teacher, rows_per_chunk
from falcon_lab.distill.rows import Labels, StudentRows, label_rows
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
from falcon_lab.timing import Stopwatch

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


class StepClock:
    """Seconds of the parts of a step.

    A GPU is waited for only in steps whose times are wanted; the waiting costs such a step a
    little.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._watch = Stopwatch()

    def begin(self, device: torch.device, *, wanted: bool) -> None:
        """Start a step; the time since the last ``mark`` was spent waiting for its data."""
        self._watch.device = None
        self._parts = {"data": self._watch.lap()}
        self._watch.device = device if wanted else None
        self.mark()

    def mark(self) -> None:
        """Start the next part here."""
        self._watch.start()

    def lap(self, name: str) -> None:
        """Add the time since the last mark or lap to the part ``name``."""
        self._parts[name] = self._parts.get(name, 0.0) + self._watch.lap()

    @property
    def seconds(self) -> dict[str, float]:
        """Part -> seconds of the step that was begun last."""
        return dict(self._parts)


@dataclass(frozen=True)
class DistillationStep:
    """A batch, the teacher and the student.

    Attributes:
        target: the frozen teacher.
        drafter: the student.
        objective: the terms of the loss.
        schedule: what is revealed.
        config: noise, repeats, unrolling, memory.
        batch: packed documents.
        seeds: the run's seed, the batch's index and the process's rank.
        clock: times the parts.
        chunk: rows of logits at a time; None: as ``config.logits_mib`` says.
    """

    target: Target
    drafter: Any
    objective: Objective
    schedule: GlancingSchedule
    config: DistillationConfig
    batch: Batch
    seeds: tuple[int, ...]
    clock: StepClock = field(default_factory=StepClock)
    chunk: int | None = None

    def train(self, ratio: float, *, accuracy: bool = False) -> tuple[Tensor, metrics.Tally]:
        """Return the loss, summed over all rows that count, and a tally of it and its terms.

        Args:
            ratio: λ of the glancing; 0 leaves the glance pass out.
            accuracy: tally the accuracy of the most likely tokens by place in the block too.
        """
        teacher = self.teacher_pass()
        self.clock.lap("teacher")
        batch, features = repeated(self.batch, teacher.features, self.config.repeats)
        inputs, reveal = self.inputs(batch, features, teacher.taps, self.config.noise), None
        if ratio > 0 or self.config.own_features > 0:
            with torch.no_grad():
                first = self.student_passes(inputs, passes=1)[0]
                labels = label_rows(batch, first)
                if self.config.own_features:
                    mixed = self._with_own_features(features, first, labels)
                    inputs = self.inputs(batch, mixed, teacher.taps, self.config.noise)
                if ratio > 0:
                    reveal = self._reveal(teacher, first, labels, ratio)
            self.clock.lap("glance")
        predictions = self.student_passes(inputs, reveal)
        self.clock.lap("student")
        tally = metrics.Tally(self.batch.tokens.device)
        losses = []
        for number, prediction in enumerate(predictions):
            labels = label_rows(batch, prediction)
            counted = self._counted(teacher, prediction, labels, None if number else reveal, tally)
            losses.append(self._loss(teacher, prediction, counted, tally, number, accuracy))
        tally.add_sum("train/revealed", 0 if reveal is None else reveal.mask.sum(), 1)
        return sum(losses[1:], losses[0]), tally

    def validate(self, number: int, tally: metrics.Tally) -> None:
        """Tally how well the drafter would have drafted, without noise or glancing.

        Args:
            number: of the batch, which seeds the block phases.
            tally: of the validation.
        """
        teacher = self.teacher_pass(mass=True)
        inputs = self.inputs(self.batch, teacher.features, teacher.taps, 0.0)
        prediction = self.drafter(replace(inputs, generator=generator_for("validation", number)))
        labels = label_rows(self.batch, prediction)
        rows = self._rows(prediction, labels)
        agree, accept = [], []

        def observe(chunk: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._tally_terms(tally, "val", terms)
            agree.append(metrics.agreement(chunk))
            accept.append(metrics.overlap(chunk))

        loss = ChunkedLoss(self.objective, teacher, self._generator("labels"), observe)(rows)
        tally.add_sum("val/loss", loss, rows.total)
        blocks = metrics.blocks_of(prediction, labels.valid, self.drafter.block, rows.index)
        metrics.add_drafted(tally, torch.cat(agree), torch.cat(accept), blocks)

    # --- the teacher ------------------------------------------------------------------------

    def teacher_pass(self, *, mass: bool = False) -> Teacher:
        """Run the target in its own precision, or take its features from the feature store.

        Args:
            mass: the loss is to know how likely the tokens of a draft vocabulary are in all.
        """
        batch, features, taps = self.batch, self.batch.features, self.batch.taps
        if features is None:
            features, taps = self._read(batch)
        elif self.target.taps and taps is None:
            raise FalconLabError(
                "the data have the target's features, and no hidden states of the layers that "
                f"{type(self.drafter).__name__} reads; set data.feature_store=null to compute both "
                "on line"
            )
        vocabulary = self.drafter.vocabulary
        wide, chunk = (
            self.chunk or rows_per_chunk(words.vocab_size, self.config.logits_mib)
            for words in (self.target, vocabulary or self.target)
        )
        again = self.config.unroll > 1
        return Teacher(
            self.target, batch, features, chunk, taps, vocabulary, wide=wide, mass=mass, again=again
        )

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

    def student_passes(
        self, inputs: DrafterInputs, reveal: Reveal | None = None, passes: int | None = None
    ) -> list[Prediction]:
        """Run the first pass and those that continue from it.

        Args:
            inputs: of the first pass.
            reveal: the labels that it is shown.
            passes: how many; None: ``config.unroll``.
        """
        inputs = replace(inputs, generator=self._generator("drafter"))
        with seeded_dropout(derive_seed(*self.seeds, "dropout"), inputs.tokens.device):
            if self.config.unroll == 1:
                return [self.drafter(inputs, reveal)]
            return list(islice(self.drafter.unroll(inputs, reveal), passes or self.config.unroll))

    def inputs(
        self, batch: Batch, features: Tensor, taps: Tensor | None, noise: float
    ) -> DrafterInputs:
        """Return what the student reads of ``[B, T, H]`` features, with uniform noise."""
        generators = (self._generator("noise"), self._generator("drafter"))
        noise = noise if "features" in self.drafter.needs else 0.0
        return drafter_inputs(batch, features, noise, generators, taps)

    def _with_own_features(self, features: Tensor, first: Prediction, labels: Labels) -> Tensor:
        share, generator = self.config.own_features, self._generator("own")
        return with_own_features(features, first, labels.valid, share, generator)

    # --- glancing ---------------------------------------------------------------------------

    def _reveal(self, teacher: Teacher, first: Prediction, labels: Labels, ratio: float) -> Reveal:
        """Choose what to reveal by where the first pass is wrong."""
        rows, right = self._wrong(teacher, first, labels)
        mask = self.schedule.reveal(rows, ratio, self._generator("reveal"))
        tokens = right if self.schedule.token_source == "target" else labels.tokens
        return Reveal(mask & labels.valid, tokens, labels.features(teacher.features))

    @torch.no_grad()
    def _wrong(
        self, teacher: Teacher, prediction: Prediction, labels: Labels
    ) -> tuple[GlanceRows, Tensor]:
        """Return where a drafter pass is wrong, and ``[B, R]`` long, the target's tokens."""
        rows = StudentRows.of(prediction, labels, self.batch.tokens.shape)
        chunks = rows.chunks(teacher.chunk)
        drafted = torch.cat([teacher.student_tokens(chunk) for chunk in chunks])
        right, wrong = torch.zeros_like(labels.tokens), torch.zeros_like(labels.valid)
        right[rows.index] = teacher.argmax()[rows.positions]
        wrong[rows.index] = drafted != right[rows.index]
        blocks = prediction.slot, prediction.group, self.drafter.block
        return GlanceRows(wrong, labels.valid, *blocks), right

    def _counted(
        self,
        teacher: Teacher,
        prediction: Prediction,
        labels: Labels,
        reveal: Reveal | None,
        tally: metrics.Tally,
    ) -> Labels:
        """Leave the rows out of the loss that the schedule leaves out, and tally their share."""
        valid = labels.valid
        if reveal is not None and not self.schedule.keep_revealed_in_loss:
            valid = valid & ~reveal.mask
        if self.schedule.chooses_rows:
            valid = valid & self.schedule.counts(self._wrong(teacher, prediction, labels)[0])
            tally.add_sum("train/kept", valid.sum(), int(labels.valid.sum()))
        return labels._replace(valid=valid)

    # --- the loss ---------------------------------------------------------------------------

    def _loss(
        self,
        teacher: Teacher,
        prediction: Prediction,
        labels: Labels,
        tally: metrics.Tally,
        number: int,
        accuracy: bool,
    ) -> Tensor:
        """Return the loss of pass ``number``, summed over its rows and weighted."""
        rows = self._rows(prediction, labels)
        agree: list[Tensor] = []

        def observe(chunk: LabelledRows, terms: dict[str, Tensor]) -> None:
            self._tally_terms(tally, "train", terms)
            if accuracy:
                agree.append(metrics.agreement(chunk))

        generator = self._generator(f"objective{number}" if number else "objective")
        loss = ChunkedLoss(self.objective, teacher, generator, observe)(rows)
        weight = self.config.unroll_decay**number
        tally.add_sum("train/loss", weight * loss.detach(), weight * rows.total)
        if accuracy:
            blocks = metrics.blocks_of(prediction, labels.valid, self.drafter.block, rows.index)
            key = f"train/pass_{number + 1}/position_{{}}" if number else "train/position_{}"
            metrics.add_by_position(tally, f"{key}/accuracy", torch.cat(agree), blocks)
        return weight * loss

    def _rows(self, prediction: Prediction, labels: Labels) -> StudentRows:
        """Return the rows of a loss, as the objective wants them ordered."""
        shape, by_group = self.batch.tokens.shape, self.objective.whole_groups
        return StudentRows.of(prediction, labels, shape, by_group=by_group)

    def _tally_terms(self, tally: metrics.Tally, stage: str, terms: dict[str, Tensor]) -> None:
        for name in self.objective.weights:
            tally.add(f"{stage}/loss/{name}", terms[name])

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(*self.seeds, purpose)
