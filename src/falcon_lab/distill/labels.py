"""Prediction rows by their blocks.

Shapes: B batch, R prediction rows, G blocks of the whole batch.

Which prediction rows count, and what they should have predicted.

Shapes: B batch, T tokens, R prediction rows, L tapped layers, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.interfaces import DrafterInputs, Prediction


def drafter_inputs(
    batch: Batch,
    features: Tensor,
    noise: float,
    generators: tuple[torch.Generator, ...],
    taps: Tensor | None = None,
) -> DrafterInputs:
    """The rows (x_{t+1}, h_t) of a batch: one fewer than it has tokens.

    Args:
        batch: packed documents.
        features: ``[B, T, H]`` of the target.
        noise: features get uniform noise in (-noise, noise).
        generators: of the noise, and the one that the drafter is given.
        taps: ``[B', T, L, H]`` of the target, where B' sequences are B once or several times over.
    """
    of_noise, of_drafter = generators
    seen = features[:, :-1]
    if noise:
        uniform = torch.rand(seen.shape, generator=of_noise, device=of_noise.device)
        seen = seen + ((2 * uniform - 1) * noise).to(seen)
    return DrafterInputs(
        tokens=batch.tokens[:, 1:],
        features=seen,
        documents=batch.documents[:, :-1],
        positions=batch.positions[:, :-1],
        generator=of_drafter,
        taps=None if taps is None else taps[:, :-1].repeat(len(seen) // len(taps), 1, 1, 1),
    )


def with_own_features(
    features: Tensor,
    prediction: Prediction,
    valid: Tensor,
    share: float,
    generator: torch.Generator,
) -> Tensor:
    """Features of which some whole blocks are the drafter's own predictions.

    In every drafting pass but the first the drafter reads features that it predicted itself, a
    block of them at a time. Meeting them in training, it learns to go on from its own errors.

    Args:
        features: ``[B, T, H]`` of the target.
        prediction: of a first pass.
        valid: ``[B, R]`` bool, rows whose prediction may be used.
        share: chance that a block is replaced.
        generator: draws the blocks.
    """
    if prediction.features is None:
        return features
    shape = (prediction.group.shape[0], int(prediction.group.max()) + 1)
    drawn = torch.rand(shape, generator=generator, device=generator.device) < share
    replaced = drawn.to(valid.device).gather(1, prediction.group) & valid
    row = replaced.nonzero(as_tuple=True)
    mixed = features.clone()
    mixed[row[0], prediction.label[row]] = prediction.features[row].to(mixed)
    return mixed


def repeated(batch: Batch, features: Tensor, times: int) -> tuple[Batch, Tensor]:
    """A batch and its ``[B, T, H]`` features, ``times`` times along B.

    A prediction has a slot of a block at every k-th row only; studied under several phases, one
    teacher pass teaches every slot about every row.
    """
    if times == 1:
        return batch, features
    tokens, loss_mask, documents, positions = (
        rows.repeat(times, 1)
        for rows in (batch.tokens, batch.loss_mask, batch.documents, batch.positions)
    )
    return Batch(tokens, loss_mask, documents, positions, batch.index), features.repeat(times, 1, 1)


class Labels(NamedTuple):
    """What every prediction row should be.

    Attributes:
        valid: ``[B, R]`` bool, rows that count.
        label: ``[B, R]`` long, the position that the row predicts (anything where not valid).
        tokens: ``[B, R]`` long, the data's token after it (anything where not valid).
    """

    valid: Tensor
    label: Tensor
    tokens: Tensor

    def features(self, features: Tensor) -> Tensor:
        """``[B, R, H]``: the target's features at the rows' labels.

        Args:
            features: ``[B', T, H]`` of the batch, which B holds once or several times over.
        """
        sequence = torch.arange(self.label.shape[0], device=self.label.device)
        return features[(sequence % features.shape[0]).unsqueeze(1), self.label]


def label_rows(batch: Batch, prediction: Prediction) -> Labels:
    """Find the labels of a prediction.

    A row counts when its newest input, its label and the token that the label's distribution is
    about lie in one document, and that token is one to learn (``loss_mask``).
    """
    last = batch.tokens.shape[1] - 1
    inside = (prediction.label >= 0) & (prediction.label < last)
    inside &= (prediction.source >= 0) & (prediction.source < last)
    label, source = prediction.label.clamp(0, last - 1), prediction.source.clamp(0, last - 1)
    own = batch.documents.gather(1, label) == batch.documents.gather(1, source)
    valid = inside & own & labelled_positions(batch).gather(1, label)
    return Labels(valid, label, batch.tokens.gather(1, label + 1))


def labelled_positions(batch: Batch) -> Tensor:
    """``[B, T]`` bool: the token after the position is of its document and one to learn."""
    here, following = batch.documents[:, :-1], batch.documents[:, 1:]
    labelled = torch.zeros_like(batch.loss_mask)
    labelled[:, :-1] = (here >= 0) & (here == following) & batch.loss_mask[:, 1:]
    return labelled
