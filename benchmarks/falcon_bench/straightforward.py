"""A training step written straightforwardly, to measure ``falcon_lab.distill`` against.

It is the step of the official code (``train/glance.py`` of Falcon's release), with what that code
gets wrong put right so that the same loss comes out: an LSTM that recurs, blocks of random phase,
the same random numbers. What it keeps of the official way: float32 logits over the whole
vocabulary, of the student and of the teacher, for every row, those that do not count and padding
too, in the glance pass and once more for the loss; plain softmax, logarithm and products over all
of them, masked at the end; a teacher pass for every phase that is studied; accuracy in every step;
and, where configured, each document as a padded sequence of its own. (The official code reads the
teacher's features from disk and has one document a step; here they are computed on line, as ours
are.)

Shapes: B sequences, T tokens, R prediction rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.data.packing import Batch
from falcon_lab.distill.inputs import (
    derive_seed,
    drafter_inputs,
    generator_for,
    repeated,
    seeded_dropout,
)
from falcon_lab.distill.rows import Labels, label_rows
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.fusing import Fuse
from falcon_lab.drafters.relaxed_mask import PackedDocuments, find_documents
from falcon_lab.interfaces import GlanceRows, Prediction, Reveal
from falcon_lab.training import make_optimizer

if TYPE_CHECKING:
    from falcon_lab.distill.module import Distillation

CLIP = 0.5
"""Of the gradient's norm, as in the main job."""


@dataclass(frozen=True)
class Manner:
    """What of the official way is kept, beside the logits.

    Attributes:
        alone: each document has a sequence of its own, padded to the longest.
        padded: the LSTM runs over one padded sequence a document.
        teach_each: a teacher pass for every phase that is studied.
    """

    alone: bool = False
    padded: bool = False
    teach_each: bool = False


class PaddedFuse(Fuse):
    """An LSTM with one padded sequence a document."""

    alone = False

    def packed(self, rows: Tensor, runs: PackedDocuments) -> Tensor:
        """Fuse packed documents as ``Fusing.packed`` does."""
        if self.alone:
            fused: Tensor = self(rows)[0]
            return fused
        return runs.pack(self(runs.unpack(rows))[0])


class StraightforwardLoop:
    """Trains a copy of a module's drafter.

    Args:
        module: whose target, schedule, settings and weights are taken over.
        manner: how.
    """

    def __init__(self, module: Distillation, manner: Manner) -> None:
        self.target, self.schedule, self.config = module.target, module.schedule, module.config
        self.objective: Any = module.objective
        self.seed, self.max_steps, self.manner = module.seed, module.max_steps, manner
        self.drafter = drafter_of(module, manner)
        weights = list(self.drafter.parameters())
        made = make_optimizer(weights, self.config.optimizer, self.max_steps)
        self.optimizer, self.learning_rate = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self.steps = 0

    def step(self, batch: Batch) -> float:
        """Run one optimiser step, and return its loss."""
        if self.manner.alone:
            batch = one_document_a_row(batch)
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), CLIP)
        self.optimizer.step()
        self.learning_rate.step()
        self.steps += 1
        return float(loss.detach())

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the rows that count."""
        batch, features = self._teach(batch)
        ratio = self.schedule.ratio(self.steps / max(1, self.max_steps))
        reveal: Reveal | None = None
        if ratio > 0:
            with torch.no_grad():
                reveal = self._glance(batch, features, ratio)
        prediction = self._study(batch, features, reveal)
        labels = label_rows(batch, prediction)
        assert prediction.features is not None
        truth = labels.features(features)
        teacher, student = self._logits(truth), self._logits(prediction.features)
        regression = functional.smooth_l1_loss(
            prediction.features.float(), truth.float(), reduction="none"
        ).mean(-1)
        p = teacher.softmax(-1)
        soft = (p * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1)
        right = teacher.argmax(-1)
        hard = functional.cross_entropy(student.flatten(0, 1), right.flatten(), reduction="none")
        weights = self.objective.config
        rows = weights.feature * regression + weights.soft * soft
        rows = rows + weights.hard * hard.view_as(rows)
        counted = self._counted(labels, reveal)
        self.accuracy = float((student.argmax(-1) == right)[counted].float().mean())
        return torch.where(counted, rows, 0.0).sum() / counted.sum().clamp_min(1)

    def _teach(self, batch: Batch) -> tuple[Batch, Tensor]:
        times = self.config.repeats
        if self.manner.teach_each:
            batch, _ = repeated(batch, torch.empty(batch.tokens.shape[0], 0, 0), times)
            times = 1
        features = self.target.teacher(batch.tokens, batch.documents, batch.positions)
        return repeated(batch, features.float(), times)

    def _logits(self, features: Tensor) -> Tensor:
        return self.target.head(features.to(self.target.dtype)).float()

    def _counted(self, labels: Labels, reveal: Reveal | None) -> Tensor:
        if reveal is None or self.schedule.keep_revealed_in_loss:
            return labels.valid
        return labels.valid & ~reveal.mask

    def _glance(self, batch: Batch, features: Tensor, ratio: float) -> Reveal:
        first = self._study(batch, features, None)
        labels = label_rows(batch, first)
        truth = labels.features(features)
        assert first.features is not None
        right = self._logits(truth).argmax(-1)
        wrong = (self._logits(first.features).argmax(-1) != right) & labels.valid
        rows = GlanceRows(wrong, labels.valid, first.slot, first.group, self.drafter.block)
        mask = self.schedule.reveal(rows, ratio, self._generator(batch, "reveal"))
        tokens = right if self.schedule.token_source == "target" else labels.tokens
        return Reveal(mask & labels.valid, tokens, truth)

    def _study(self, batch: Batch, features: Tensor, reveal: Reveal | None) -> Prediction:
        generators = (self._generator(batch, "noise"), self._generator(batch, "drafter"))
        inputs = drafter_inputs(batch, features, self.config.noise, generators)
        with seeded_dropout(derive_seed(*self._parts(batch, "dropout")), features.device):
            prediction: Prediction = self.drafter(inputs, reveal)
            return prediction

    def _parts(self, batch: Batch, purpose: str) -> tuple[int | str, ...]:
        return self.seed, int(batch.index), 0, purpose

    def _generator(self, batch: Batch, purpose: str) -> torch.Generator:
        return generator_for(*self._parts(batch, purpose))


def drafter_of(module: Distillation, manner: Manner) -> FalconDrafter:
    """Return a drafter with the module's weights, in training mode."""
    from falcon_lab.interfaces import BuildContext

    config = module.drafter.config
    drafter = FalconDrafter(config, BuildContext(module.target))
    if manner.padded or manner.alone:
        width, layers = module.target.hidden_size, config.lstm_layers
        drafter.fuse = fuse = PaddedFuse(config.fuse, width, layers=layers, dropout=config.dropout)
        fuse.alone = manner.alone
    drafter.load_state_dict(module.drafter.state_dict())
    return drafter.train()


def one_document_a_row(batch: Batch) -> Batch:
    """Return packed documents, each as a sequence of its own, as long as the longest of them."""
    real = batch.documents >= 0
    runs = find_documents(batch.documents)
    used, row = torch.unique(runs.number[real], return_inverse=True)
    place = row, runs.offset[real]
    shape = int(used.shape[0]), int(runs.offset[real].max()) + 1
    tokens, mask, documents, positions = (
        values.new_full(shape, fill).index_put(place, values[real])
        for values, fill in zip(batch[:4], (0, False, -1, 0), strict=True)
    )
    return Batch(tokens, mask, documents, positions, batch.index)
