"""Student and teacher side by side, for a few rows at a time.

Logits are the largest tensors of a step, T times V of them where everything else is T times H. So
they are made for as many rows as ``distillation.logits_mib`` has room for, looked at, and let go.

Shapes: B sequences, T tokens of one, P positions with a label, R prediction rows, R' rows that
count, n rows of a part, L tapped layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from falcon_lab.data.batch import Batch
from falcon_lab.distillation.labelling import Labels, labelled_positions
from falcon_lab.protocols import LabelledRows, Prediction

if TYPE_CHECKING:
    from falcon_lab.targets.target import Target

MIB = 2**20
FLOAT32 = 4


def rows_at_once(vocabulary: int, mebibytes: int) -> int:
    """Rows whose two logits, the student's and the teacher's in float32, fill the given room."""
    return max(1, mebibytes * MIB // (2 * FLOAT32 * vocabulary))


@dataclass(frozen=True, slots=True)
class StudentRows:
    """A prediction's rows that count, ordered by the position that they predict.

    So rows that predict the same position, under several block phases, are neighbours.

    Attributes:
        features: ``[R', H]`` or None.
        logits: ``[R', V]`` of a drafter that gives them itself, or None.
        places: ``[R']`` long, ``b·T + t`` of the position that the row predicts, ascending.
        tokens: ``[R']`` long, the data's token after that position.
        slot: ``[R']`` long, place in the block.
        index: two ``[R']`` long, sequence and row of the prediction.
        head: the student's own, or None.
        hidden: ``[R', C]``, what it reads in place of the features, or None.
    """

    features: Tensor | None
    logits: Tensor | None
    places: Tensor
    tokens: Tensor
    slot: Tensor
    index: tuple[Tensor, Tensor]
    head: Callable[[Tensor, Tensor], Tensor] | None = None
    hidden: Tensor | None = None

    @classmethod
    def of(cls, prediction: Prediction, labels: Labels, shape: torch.Size) -> Self:
        """The rows that count.

        Args:
            prediction: of the student.
            labels: of all its rows.
            shape: sequences and tokens of the teacher's batch, of which the student may have
                studied several copies.
        """
        sequences, length = shape
        sequence, row = labels.valid.nonzero(as_tuple=True)
        places = sequence % sequences * length + labels.label[sequence, row]
        places, order = places.sort(stable=True)
        sequence, row = sequence[order], row[order]
        flat = sequence * labels.valid.shape[1] + row
        return cls(
            _chosen(prediction.features, flat),
            _chosen(prediction.logits, flat),
            places,
            labels.tokens[sequence, row],
            prediction.slot[sequence, row],
            (sequence, row),
            prediction.head,
            _chosen(prediction.hidden, flat),
        )

    def __len__(self) -> int:
        return self.places.shape[0]

    def parts(self, size: int) -> Iterator[Self]:
        """The rows, ``size`` at a time; without any rows one part that has none."""
        for start in range(0, max(1, len(self)), size):
            part = slice(start, start + size)
            yield replace(
                self,
                features=None if self.features is None else self.features[part],
                logits=None if self.logits is None else self.logits[part],
                hidden=None if self.hidden is None else self.hidden[part],
                places=self.places[part],
                tokens=self.tokens[part],
                slot=self.slot[part],
                index=(self.index[0][part], self.index[1][part]),
            )


def _chosen(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values.flatten(0, 1).index_select(0, rows)


class Teacher:
    """The target's features of a batch, and its logits where they are asked for.

    Args:
        target: the target.
        batch: what it has read.
        features: ``[B, T, H]``, what it made of it.
        rows: of logits at once.
        taps: ``[B, T, L, H]`` of a target that is tapped.
    """

    def __init__(
        self,
        target: Target,
        batch: Batch,
        features: Tensor,
        rows: int,
        taps: Tensor | None = None,
    ) -> None:
        self.target, self.batch, self.features, self.rows = target, batch, features, rows
        self.taps = taps
        self._flat = features.flatten(0, 1)
        self._choices: Tensor | None = None
        self._kept: Tensor | None = None  # [P, V], where all of them fit
        self._number: Tensor | None = None  # [B * T], place -> row of them

    @torch.no_grad()
    def choices(self) -> Tensor:
        """``[B·T]`` long: the target's most likely token after each position that has a label.

        Where the logits of all these positions fit, they are kept for the loss.
        """
        if self._choices is None:
            self._choices = self._choose()
        return self._choices

    def _choose(self) -> Tensor:
        labelled = labelled_positions(self.batch).flatten()
        positions = labelled.nonzero().squeeze(1)
        choices = torch.zeros_like(labelled, dtype=torch.long)
        for part in positions.split(self.rows):
            logits = self._head(self._flat[part])
            choices[part] = logits.argmax(-1)
            if len(part) == len(positions):
                self._kept, self._number = logits, labelled.cumsum(0) - 1
        return choices

    @torch.no_grad()
    def logits(self, places: Tensor) -> Tensor:
        """``[n, V]`` at ``places`` ``[n]``, ascending; equal ones are computed once."""
        if self._kept is not None and self._number is not None:
            return self._kept[self._number[places]]
        positions, number = torch.unique_consecutive(places, return_inverse=True)
        logits = self._head(self._flat[positions])
        return logits if len(positions) == len(places) else logits[number]

    def _head(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return self.target.head(features.to(self.target.dtype))

    def student_logits(self, rows: StudentRows) -> Tensor:
        """``[n, V]``: the student's own logits, or its own or the target's head on its features."""
        if rows.logits is not None:
            return rows.logits
        read = rows.features if rows.hidden is None else rows.hidden
        assert read is not None, "a drafter predicts features or logits"
        if rows.head is not None:
            return rows.head(read, rows.slot)
        return self.target.head(read.to(self.target.dtype))

    def compare(self, rows: StudentRows, generator: torch.Generator) -> LabelledRows:
        """All that an objective may look at; ``generator`` is for labels that are drawn."""
        return LabelledRows(
            rows.features,
            self.student_logits(rows),
            self._flat[rows.places],
            self.logits(rows.places),
            rows.tokens,
            generator,
            rows.slot,
        )
