"""The loss over all rows of a step, from logits of a few rows at a time.

The LM head is frozen and every row's terms are its own, so a part's loss and its gradient with
respect to the student's rows can be computed together, as fused kernels of cross-entropy do (Liger,
arXiv 2410.10989): the head runs forward and backward once, and what the backward pass of the
step has to do is one multiplication.

Shapes: R' rows that count, n rows of a part, H hidden, V vocabulary.

Student and teacher side by side, for a few rows at a time.

Logits are the largest tensors of a step, T times V of them where everything else is T times H. So
they are made for as many rows as ``distillation.logits_mib`` has room for, looked at, and let go.

Shapes: B sequences, T tokens of one, P positions with a label, R prediction rows, R' rows that
count, n rows of a part, L tapped layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from falcon_lab.data.packing import Batch
from falcon_lab.distill.labels import Labels, labelled_positions
from falcon_lab.interfaces import LabelledRows, Objective, Prediction

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

Look = Callable[[LabelledRows, dict[str, Tensor]], None]
"""Takes a part's rows and terms, without gradient."""


class _Known(torch.autograd.Function):
    """A number whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * factor for gradient in ctx.saved_tensors)


class RowLoss:
    """The sum of an objective's weighted terms over all rows.

    A term of a row may depend on that row alone, since the objective sees a part of them at a time.

    Args:
        objective: what the student is asked for.
        teacher: of the step.
        generator: for labels that are drawn; it goes on from part to part, so that as long as one
            row takes one draw the draws do not depend on the parts.
        look: is shown every part once.
    """

    def __init__(
        self, objective: Objective, teacher: Teacher, generator: torch.Generator, look: Look
    ) -> None:
        self.objective, self.teacher = objective, teacher
        self.generator, self.look = generator, look

    def __call__(self, rows: StudentRows) -> Tensor:
        """The loss, from which the gradient of ``rows`` can be had."""
        parts = list(rows.parts(self.teacher.rows))
        if len(parts) == 1 or not torch.is_grad_enabled():
            return self._sum(self._part(part) for part in parts)
        state, leaf = self.generator.get_state(), _as_leaf(parts[0])
        loss = self._part(leaf)
        if _others(loss, _inputs(leaf)):
            # Weights that are reached past the rows want the graph of every part.
            self.generator.set_state(state)
            return self._sum([self._again(parts[0], seen=True), *map(self._again, parts[1:])])
        losses, gradients = [loss.detach()], [_gradients(loss, leaf)]
        for part in parts[1:]:
            leaf = _as_leaf(part)
            loss = self._part(leaf)
            losses.append(loss.detach())
            gradients.append(_gradients(loss, leaf))
        whole = tuple(torch.cat(pieces) for pieces in zip(*gradients, strict=True))
        known: Tensor = _Known.apply(self._sum(losses), whole, *_inputs(rows))
        return known

    def _part(self, rows: StudentRows, *, seen: bool = False) -> Tensor:
        compared = self.teacher.compare(rows, self.generator)
        terms = self.objective(compared)
        if not seen:
            with torch.no_grad():
                self.look(compared, terms)
        loss = torch.zeros((), device=rows.places.device)
        for name, weight in self.objective.weights.items():
            loss = loss + weight * terms[name].sum()
        return loss

    def _again(self, rows: StudentRows, *, seen: bool = False) -> Tensor:
        """A part of which the backward pass keeps nothing, and which it computes once more."""
        state, calls = self.generator.get_state(), [seen]

        def compute(*_: Tensor) -> Tensor:
            self.generator.set_state(state)
            loss = self._part(rows, seen=calls[-1])
            calls.append(True)
            return loss

        loss: Tensor = checkpoint(compute, *_inputs(rows), use_reentrant=False)
        return loss

    def _sum(self, losses: Iterator[Tensor] | list[Tensor]) -> Tensor:
        return torch.stack(list(losses)).sum()


def _inputs(rows: StudentRows) -> list[Tensor]:
    """What a gradient is wanted of: the student's features, its logits, what it makes them of."""
    return [of for of in (rows.features, rows.logits, rows.hidden) if of is not None]


def _as_leaf(rows: StudentRows) -> StudentRows:
    def cut(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().requires_grad_()

    return replace(
        rows, features=cut(rows.features), logits=cut(rows.logits), hidden=cut(rows.hidden)
    )


def _gradients(loss: Tensor, rows: StudentRows) -> tuple[Tensor, ...]:
    inputs = _inputs(rows)
    if not loss.requires_grad:
        return tuple(torch.zeros_like(values) for values in inputs)
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def _others(loss: Tensor, leaves: list[Tensor]) -> bool:
    """Whether the loss depends on weights that are not among ``leaves``."""
    known = {id(leaf) for leaf in leaves}
    found, seen = [loss.grad_fn], set()
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            return True
        found += [following for following, _ in node.next_functions]
    return False


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
