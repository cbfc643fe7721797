"""Which prediction rows count, and what they should have predicted.

Shapes: B batch, T tokens, R prediction rows, R' rows that count, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from falcon_lab.data.batch import Batch
from falcon_lab.protocols import DrafterInputs, Prediction


def drafter_inputs(
    batch: Batch, features: Tensor, noise: float, generators: tuple[torch.Generator, ...]
) -> DrafterInputs:
    """The rows (x_{t+1}, h_t) of a batch: one fewer than it has tokens.

    Args:
        batch: packed documents.
        features: ``[B, T, H]`` of the target.
        noise: features get uniform noise in (-noise, noise).
        generators: of the noise, and the one that the drafter is given.
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
        features: ``[B, R, H]``, the target's at the row's label (anything where not valid).
        tokens: ``[B, R]`` long, the data's token after it (anything where not valid).
    """

    valid: Tensor
    features: Tensor
    tokens: Tensor


def label_rows(batch: Batch, features: Tensor, prediction: Prediction) -> Labels:
    """Find the labels of a prediction.

    A row counts when its newest input, its label and the token that the label's distribution is
    about lie in one document, and that token is one to learn (``loss_mask``).
    """
    last = batch.tokens.shape[1] - 1
    inside = (prediction.label >= 0) & (prediction.label < last)
    inside &= (prediction.source >= 0) & (prediction.source < last)
    label, source = prediction.label.clamp(0, last - 1), prediction.source.clamp(0, last - 1)
    document = batch.documents.gather(1, label)
    valid = (
        inside
        & (document >= 0)
        & (document == batch.documents.gather(1, source))
        & (document == batch.documents.gather(1, label + 1))
        & batch.loss_mask.gather(1, label + 1)
    )
    at_label = features.gather(1, label.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
    return Labels(valid, at_label, batch.tokens.gather(1, label + 1))
