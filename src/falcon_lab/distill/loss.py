"""The loss over all rows of a step, from logits of a chunk of rows at a time.

Logits are the largest tensors of a step, T times V of them where everything else is T times H. So
they are made for as many rows as ``distillation.logits_mib`` has room for, used, and freed.

The LM head is frozen and every row's terms are its own, so a chunk's loss and its gradient with
respect to the drafter's outputs can be computed together, as fused kernels of cross-entropy do
(Liger, arXiv 2410.10989): the head runs forward and backward once, and the backward pass of the
step has one multiplication left to do.

Shapes: B sequences, T tokens, P positions with a label, R' rows that count, n rows of a chunk,
L tapped layers, H hidden, V vocabulary, C columns of the student's logits (V, or the draft
vocabulary's).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import StudentRows, labelled_positions
from falcon_lab.interfaces import DraftVocabulary, LabelledRows, Objective
from falcon_lab.sampling import most_likely

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

Observe = Callable[[LabelledRows, dict[str, Tensor]], None]
"""Called with a chunk's rows and terms, without gradient."""
MIB = 2**20
FLOAT32 = 4


def rows_per_chunk(vocabulary: int, mebibytes: int) -> int:
    """Return how many rows of two float32 logits, drafter's and target's, fill the given room."""
    return max(1, mebibytes * MIB // (2 * FLOAT32 * vocabulary))


class Teacher:
    """The target's features of a batch, and its logits where they are needed.

    Args:
        target: the frozen target.
        batch: what it has read.
        features: ``[B, T, H]`` of the batch.
        chunk: rows of logits at a time.
        taps: ``[B, T, L, H]`` of a target that is tapped.
        vocabulary: the tokens that the drafter may propose; None: all.
        wide: rows of V logits at a time; None: ``chunk``.
        mass: whether the probability of those tokens is needed too.
        again: whether several passes of the drafter are compared with these logits, which are then
            kept where there is room for them.
    """

    def __init__(
        self,
        target: Target,
        batch: Batch,
        features: Tensor,
        chunk: int,
        taps: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
        *,
        wide: int | None = None,
        mass: bool = False,
        again: bool = False,
    ) -> None:
        self.target, self.batch, self.features, self.chunk = target, batch, features, chunk
        self.taps, self.vocabulary = taps, vocabulary
        self._wide, self._wants_mass = wide or chunk, mass and vocabulary is not None
        self._again = again
        self._flat = features.flatten(0, 1)
        self._argmax: Tensor | None = None
        self._mass: Tensor | None = None  # [B * T]
        self._logits: Tensor | None = None  # [P, C], where there is room for all of them
        self._row: Tensor | None = None  # [B * T], position -> its row of them

    @torch.no_grad()
    def argmax(self) -> Tensor:
        """Return ``[B·T]`` long: the target's most likely token after each labelled position.

        Where the logits of all these positions, in the target's precision, take no more room than
        a chunk of float32 ones, they are kept for the loss.
        """
        if self._argmax is None:
            labelled, positions, fit = self._labelled()
            if (known := self._stored(fit)) is not None:
                self._argmax = known
                return known
            self._argmax = torch.zeros_like(labelled, dtype=torch.long)
            self._mass = torch.ones_like(labelled, dtype=torch.float) if self._wants_mass else None
            for start in range(0, len(positions), self._wide):
                part = positions[start : start + self._wide]
                logits = narrow = self._head(self._flat[part], self.target)
                self._argmax[part] = most_likely(logits)
                if self.vocabulary is not None and (fit or self._mass is not None):
                    narrow = logits[:, self.vocabulary.ids]
                if self._mass is not None:
                    of_all = logits.float().logsumexp(-1)
                    self._mass[part] = (narrow.float().logsumexp(-1) - of_all).exp()
                if fit:
                    self._keep(narrow, start, labelled)
        return self._argmax

    def _labelled(self) -> tuple[Tensor, Tensor, bool]:
        """Return what is labelled, ``[B·T]`` bool and ``[P]`` long, and whether its logits fit."""
        labelled = labelled_positions(self.batch).flatten()
        positions = labelled.nonzero().squeeze(1)
        fit = len(positions) * self.target.dtype.itemsize <= self.chunk * FLOAT32
        return labelled, positions, fit

    def _stored(self, fit: bool) -> Tensor | None:
        """Return a feature store's tokens, unless the logits are wanted as well.

        Those of the whole vocabulary are kept for the loss where they fit, so that their most
        likely tokens cost nothing.
        """
        wanted = self._wants_mass or (fit and self.vocabulary is None)
        return None if wanted or self.batch.argmax is None else self.batch.argmax.flatten()

    def _keep(self, logits: Tensor, start: int, labelled: Tensor) -> None:
        """Keep a chunk of the labelled positions' logits, beginning with number ``start``."""
        if self._logits is None:
            self._row, count = labelled.cumsum(0) - 1, int(labelled.sum())
            if len(logits) == count:
                self._logits = logits
                return
            self._logits = logits.new_empty(count, logits.shape[-1])
        self._logits[start : start + len(logits)] = logits

    @torch.no_grad()
    def logits(self, positions: Tensor) -> Tensor:
        """Return ``[n, C]`` at ``[n]`` positions; equal neighbours are computed once."""
        if self._logits is None and self._again:
            self._again = False  # whether they fit is asked once
            labelled, places, fit = self._labelled()
            if fit:
                self._keep(self._head(self._flat[places], self._words), 0, labelled)
        if self._logits is not None and self._row is not None:
            return self._logits.index_select(0, self._row[positions])
        different, row = torch.unique_consecutive(positions, return_inverse=True)
        logits = self._head(self._flat[different], self._words)
        return logits if len(different) == len(positions) else logits[row]

    @property
    def _words(self) -> Target | DraftVocabulary:
        """Return what has the LM head of the student's columns."""
        return self.vocabulary or self.target

    def _head(self, features: Tensor, words: Target | DraftVocabulary) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return words.head(features.to(self.target.dtype))

    def student_logits(self, rows: StudentRows) -> Tensor:
        """Return ``[n, C]``: the drafter's logits, by its own head or the target's."""
        if rows.logits is not None:
            return rows.logits
        read = rows.features if rows.hidden is None else rows.hidden
        assert read is not None, "a drafter predicts features or logits"
        if rows.head is not None:
            return rows.head(read, rows.slot)
        return self._words.head(read.to(self.target.dtype))

    def student_tokens(self, rows: StudentRows) -> Tensor:
        """Return ``[n]`` long: the drafter's most likely tokens."""
        columns = most_likely(self.student_logits(rows))
        return columns if self.vocabulary is None else self.vocabulary.tokens(columns)

    def compare(self, rows: StudentRows, generator: torch.Generator) -> LabelledRows:
        """Return what an objective may read; ``generator`` is for labels that are drawn."""
        tokens, known, mass = rows.tokens, None, None
        if self.vocabulary is not None:
            tokens = self.vocabulary.columns(tokens)
            known = self.vocabulary.columns(self.argmax()[rows.positions]) >= 0
            mass = None if self._mass is None else self._mass[rows.positions]
        return LabelledRows(
            rows.features,
            self.student_logits(rows),
            self._flat[rows.positions],
            self.logits(rows.positions),
            tokens,
            generator,
            rows.slot,
            known,
            mass,
            rows.group,
        )


class ChunkedLoss:
    """The sum of an objective's weighted terms over all rows.

    A term of a row may depend on that row or on its block alone, since the objective is given a
    chunk at a time. Rows that have weights count by these.

    Args:
        objective: names and computes the terms.
        teacher: of the step.
        generator: for labels that are drawn. Its state continues from chunk to chunk, so that with
            one draw a row the draws do not depend on the chunks.
        observe: is given every chunk once.
    """

    def __init__(
        self, objective: Objective, teacher: Teacher, generator: torch.Generator, observe: Observe
    ) -> None:
        self.objective, self.teacher = objective, teacher
        self.generator, self.observe = generator, observe

    def __call__(self, rows: StudentRows) -> Tensor:
        """Return the loss, through which gradients flow to the drafter's outputs."""
        chunks = list(rows.chunks(self.teacher.chunk))
        if len(chunks) == 1 or not torch.is_grad_enabled():
            return _sum(self._loss(chunk) for chunk in chunks)
        state = self.generator.get_state()
        losses: list[Tensor] = []
        gradients: list[tuple[Tensor, ...]] = []
        for chunk in chunks:
            leaf = chunk.with_outputs(lambda values: values.detach().requires_grad_())
            loss = self._loss(leaf)
            if not losses and _reaches_other_weights(loss, leaf.outputs):
                # A drafter's own head is trained too, and wants the graph of every chunk.
                self.generator.set_state(state)
                first, *later = chunks
                first_loss = self._recomputed(first, observed=True)
                return _sum([first_loss, *map(self._recomputed, later)])
            losses.append(loss.detach())
            gradients.append(_gradients(loss, leaf.outputs))
        whole = tuple(torch.cat(pieces) for pieces in zip(*gradients, strict=True))
        known: Tensor = _KnownGradient.apply(_sum(losses), whole, *rows.outputs)
        return known

    def _loss(self, rows: StudentRows, *, observed: bool = False) -> Tensor:
        compared = self.teacher.compare(rows, self.generator)
        terms = self.objective(compared)
        if not observed:
            with torch.no_grad():
                self.observe(compared, terms)
        loss = torch.zeros((), device=rows.positions.device)
        for name, weight in self.objective.weights.items():
            term = terms[name] if rows.weight is None else terms[name] * rows.weight
            loss = loss + weight * term.sum()
        return loss

    def _recomputed(self, rows: StudentRows, *, observed: bool = False) -> Tensor:
        """Return a chunk's loss, whose graph is not kept but computed again in the backward."""
        state, calls = self.generator.get_state(), [observed]

        def compute(*_: Tensor) -> Tensor:
            self.generator.set_state(state)
            loss = self._loss(rows, observed=calls[-1])
            calls.append(True)
            return loss

        loss: Tensor = checkpoint(compute, *rows.outputs, use_reentrant=False)
        return loss


class _KnownGradient(torch.autograd.Function):
    """A number whose gradients with respect to some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *_: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(gradient * factor for gradient in ctx.saved_tensors)


def _sum(losses: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(losses)).sum()


def _gradients(loss: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
    if not loss.requires_grad:
        return tuple(torch.zeros_like(values) for values in outputs)
    return torch.autograd.grad(loss, outputs, materialize_grads=True)


def _reaches_other_weights(loss: Tensor, leaves: list[Tensor]) -> bool:
    """Return whether the loss depends on weights that are not among ``leaves``."""
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
