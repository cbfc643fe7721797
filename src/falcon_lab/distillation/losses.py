"""The loss over all rows of a step, from logits of a few rows at a time.

The LM head is frozen and every row's terms are its own, so a part's loss and its gradient with
respect to the student's rows can be computed together, as fused kernels of cross-entropy do (Liger,
arXiv 2410.10989): the head runs forward and backward once, and what the backward pass of the
step has to do is one multiplication.

Shapes: R' rows that count, n rows of a part, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from falcon_lab.distillation.comparison import StudentRows, Teacher
from falcon_lab.protocols import LabelledRows, Objective

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
