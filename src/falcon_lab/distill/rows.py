"""The rows of a prediction: which of them count, and what each should have predicted.

Shapes: B sequences, T tokens, R prediction rows, R' rows that count, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.interfaces import Prediction


class Labels(NamedTuple):
    """What every row of a prediction should be.

    Attributes:
        valid: ``[B, R]`` bool, rows that count.
        label: ``[B, R]`` long, the position that the row predicts (anything where not valid).
        tokens: ``[B, R]`` long, the data's token after it (anything where not valid).
    """

    valid: Tensor
    label: Tensor
    tokens: Tensor

    def features(self, features: Tensor) -> Tensor:
        """Return ``[B, R, H]``, the target's features at the rows' labels.

        Args:
            features: ``[B', T, H]`` of the batch, which B holds once or several times over.
        """
        sequence = torch.arange(self.label.shape[0], device=self.label.device)
        return features[(sequence % features.shape[0]).unsqueeze(1), self.label]


def label_rows(batch: Batch, prediction: Prediction) -> Labels:
    """Find the labels of a prediction.

    A row counts when its newest input, its label and the token that the label's distribution is
    about lie in one document, and the loss mask has that token.
    """
    last = batch.tokens.shape[1] - 1
    inside = (prediction.label >= 0) & (prediction.label < last)
    inside &= (prediction.source >= 0) & (prediction.source < last)
    label, source = prediction.label.clamp(0, last - 1), prediction.source.clamp(0, last - 1)
    own = batch.documents.gather(1, label) == batch.documents.gather(1, source)
    valid = inside & own & labelled_positions(batch).gather(1, label)
    return Labels(valid, label, batch.tokens.gather(1, label + 1))


def labelled_positions(batch: Batch) -> Tensor:
    """Return ``[B, T]`` bool: the next token is of the same document and in the loss mask."""
    here, following = batch.documents[:, :-1], batch.documents[:, 1:]
    labelled = torch.zeros_like(batch.loss_mask)
    labelled[:, :-1] = (here >= 0) & (here == following) & batch.loss_mask[:, 1:]
    return labelled


@dataclass(frozen=True, slots=True)
class StudentRows:
    """A prediction's rows that count, ordered by the position that they predict, or by block.

    So rows that predict the same position, under several block phases, are neighbours, or those of
    a block, by their slots.

    Attributes:
        features: ``[R', H]`` or None.
        logits: ``[R', V]`` of a drafter that gives them itself, or None.
        positions: ``[R']`` long, ``b·T + t`` of the position that the row predicts; ascending,
            or within a block.
        tokens: ``[R']`` long, the data's token after that position.
        slot: ``[R']`` long, place in the block.
        index: two ``[R']`` long, sequence and row of the prediction.
        head: the drafter's own, or None.
        hidden: ``[R', C]``, what the head reads in place of the features, or None.
        weight: ``[R']``, or None where all count alike.
        group: ``[R']`` long, ascending, the number of the row's block, where they are ordered so.
    """

    features: Tensor | None
    logits: Tensor | None
    positions: Tensor
    tokens: Tensor
    slot: Tensor
    index: tuple[Tensor, Tensor]
    head: Callable[[Tensor, Tensor], Tensor] | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None
    group: Tensor | None = None

    @classmethod
    def of(
        cls,
        prediction: Prediction,
        labels: Labels,
        shape: torch.Size,
        *,
        by_group: bool = False,
    ) -> Self:
        """Gather the rows that count.

        Args:
            prediction: the drafter's.
            labels: of all its rows.
            shape: sequences and tokens of the teacher's batch, of which the drafter may have read
                several copies.
            by_group: order them by block and slot, not by position.
        """
        sequences, length = shape
        sequence, row = labels.valid.nonzero(as_tuple=True)
        positions = sequence % sequences * length + labels.label[sequence, row]
        group = None
        if by_group:
            order, group = _by_group(prediction, sequence, row)
            positions = positions[order]
        else:
            positions, order = positions.sort(stable=True)
        sequence, row = sequence[order], row[order]
        flat = sequence * labels.valid.shape[1] + row

        def chosen(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.flatten(0, 1).index_select(0, flat)

        return cls(
            chosen(prediction.features),
            chosen(prediction.logits),
            positions,
            labels.tokens[sequence, row],
            prediction.slot[sequence, row],
            (sequence, row),
            prediction.head,
            chosen(prediction.hidden),
            chosen(prediction.weight),
            group,
        )

    def __len__(self) -> int:
        return self.positions.shape[0]

    @property
    def total(self) -> float:
        """Return the sum of the rows' weights: what the loss is divided by."""
        return len(self) if self.weight is None else float(self.weight.sum())

    @property
    def outputs(self) -> list[Tensor]:
        """Return the outputs through which gradients flow: features, logits, hidden states."""
        return [of for of in (self.features, self.logits, self.hidden) if of is not None]

    def with_outputs(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the rows with each of the drafter's outputs replaced by ``change`` of it."""

        def changed(values: Tensor | None) -> Tensor | None:
            return None if values is None else change(values)

        return replace(
            self,
            features=changed(self.features),
            logits=changed(self.logits),
            hidden=changed(self.hidden),
        )

    def chunks(self, size: int) -> Iterator[Self]:
        """Yield the rows, ``size`` at a time; where there are none, one chunk of none.

        No block is cut that ``group`` knows of; one that is larger than ``size`` is a chunk.
        """
        for start, end in _pieces(self.group, len(self), size):

            def cut(values: Tensor, part: slice = slice(start, end)) -> Tensor:
                return values[part]

            yield replace(
                self.with_outputs(cut),
                positions=cut(self.positions),
                tokens=cut(self.tokens),
                slot=cut(self.slot),
                index=(cut(self.index[0]), cut(self.index[1])),
                weight=None if self.weight is None else cut(self.weight),
                group=None if self.group is None else cut(self.group),
            )


def _by_group(prediction: Prediction, sequence: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of rows by sequence, block and slot, and their blocks' numbers in it."""
    group, slot = prediction.group[sequence, row], prediction.slot[sequence, row]
    order = torch.arange(len(row), device=row.device)
    for key in (slot, group, sequence):
        order = order[key[order].argsort(stable=True)]
    blocks = torch.stack((sequence, group), 1)[order]
    return order, blocks.unique_consecutive(dim=0, return_inverse=True)[1]


def _pieces(group: Tensor | None, count: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where chunks of at most ``size`` rows begin and end."""
    if group is None:
        yield from ((start, start + size) for start in range(0, max(1, count), size))
        return
    sizes = group.unique_consecutive(return_counts=True)[1].tolist()
    start = end = 0
    for rows in sizes:
        if end > start and end + rows - start > size:
            yield start, end
            start = end
        end += rows
    yield start, end
