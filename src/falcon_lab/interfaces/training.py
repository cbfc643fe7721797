"""What a training step is made of: inputs, predictions, glancing schedule and objective.

Shapes: B batch, T tokens, R prediction rows, R' rows that count, V vocabulary (the draft
vocabulary, where the drafter has one), H hidden, L tapped layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from falcon_lab.interfaces.vocabulary import OUTSIDE


@dataclass(frozen=True, slots=True)
class DrafterInputs:
    """What a drafter is trained on: T pairs (x_{t+1}, h_t) of packed documents.

    Attributes:
        tokens: ``[B, T]`` long, the token one step ahead of each feature.
        features: ``[B, T, H]`` target features (noise already added).
        documents: ``[B, T]`` long, document of each pair, which attends to that alone.
        positions: ``[B, T]`` long, position of each pair in its document, 0-based.
        generator: the source of all randomness of this step (block phases, noise).
        taps: ``[B, T, L, H]`` hidden states of the layers that the drafter taps, without noise;
            None when it taps none.
    """

    tokens: Tensor
    features: Tensor
    documents: Tensor
    positions: Tensor
    generator: torch.Generator
    taps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """R rows of a drafter's training output.

    Attributes:
        features: ``[B, R, H]``, or None for a drafter that predicts tokens alone.
        logits: ``[B, R, V]``; None asks for ``head``, for as many rows at a time as there is room.
        label: ``[B, R]`` long, the position t whose target feature h_t (and whose next-token
            distribution) the row predicts; out of range means no label.
        source: ``[B, R]`` long, the newest position whose true input the row may depend on.
            A row counts only where source and label lie in one document. In the later passes of
            ``Drafter.unroll`` it stays that of the pass which the branch began with: the last
            position whose true feature the row depends on, though it has read true tokens up to
            the one before its label's.
        slot: ``[B, R]`` long, place in the block, 0..k-1 (0 is the next token).
        group: ``[B, R]`` long, block of the row, equal for the rows of one block, unique in the
            sequence.
        head: ``[n, H]`` features and ``[n]`` slots of any rows -> ``[n, V]``, where the drafter has
            heads of its own; None: ``host.head``.
        hidden: ``[B, R, C]``, what the head reads in place of the features, where these are none
            that it reads.
        weight: ``[B, R]`` float, how much each row counts in the loss, which is the weighted mean
            (a diffusion model's bound has 1/t); None: all alike.
    """

    features: Tensor | None
    logits: Tensor | None
    label: Tensor
    source: Tensor
    slot: Tensor
    group: Tensor
    head: Callable[[Tensor, Tensor], Tensor] | None = None
    hidden: Tensor | None = None
    weight: Tensor | None = None


class FirstWeights(ABC):
    """Solves for the weights that a drafter's training begins with, in place of random ones.

    ``distillation.least_squares`` asks for them: ``add`` is called with so many tokens of the
    training data, and then ``assign``.
    """

    @abstractmethod
    def add(self, inputs: DrafterInputs, features: Tensor) -> None:
        """Take packed documents in.

        Args:
            inputs: T pairs of them, without noise.
            features: ``[B, T + 1, H]`` of the target, from the first position on.
        """

    @abstractmethod
    def assign(self) -> int:
        """Set the drafter's weights.

        Returns:
            The rows that the solution rests on; without any the weights stay as they were.
        """


@dataclass(frozen=True, slots=True)
class Reveal:
    """Labels that a glancing schedule shows to the drafter in place of its inputs.

    Attributes:
        mask: ``[B, R]`` bool, the rows of the first pass's ``Prediction`` that are shown.
        tokens: ``[B, R]`` long, the token that the row's label feature predicts.
        features: ``[B, R, H]`` the label features themselves.
    """

    mask: Tensor
    tokens: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True)
class GlanceRows:
    """What a glancing schedule chooses from.

    Attributes:
        wrong: ``[B, R]`` bool, valid rows where the first pass and the target disagree.
        valid: ``[B, R]`` bool, rows that have a label and count in the loss.
        slot: ``[B, R]`` long, place in the block.
        group: ``[B, R]`` long, block of the row.
        block: k.
    """

    wrong: Tensor
    valid: Tensor
    slot: Tensor
    group: Tensor
    block: int


class GlancingSchedule(ABC):
    """Decides how much of the labels, and which of them, the second pass may see.

    Attributes:
        token_source: revealed tokens are the target's argmax or the data's own tokens.
        keep_revealed_in_loss: upstream Falcon True, GLAT False.
    """

    __slots__ = ()
    token_source: Literal["target", "data"] = "target"
    keep_revealed_in_loss: bool = True

    @abstractmethod
    def ratio(self, progress: float) -> float:
        """Return λ at ``progress`` in [0, 1] of the training. 0 skips the first pass."""

    @abstractmethod
    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Choose the rows to show: ``[B, R]`` bool."""

    def counts(self, rows: GlanceRows) -> Tensor:
        """Choose the rows that the loss has: ``[B, R]`` bool, all valid ones by default.

        ``rows.wrong`` is about the pass that the loss is computed from.
        """
        return rows.valid

    @property
    def chooses_rows(self) -> bool:
        """Whether ``counts`` leaves any row out; else that pass need not be compared first."""
        return type(self).counts is not GlancingSchedule.counts


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """Student and teacher side by side, for the rows that count only (R' of them).

    With a draft vocabulary all logits and tokens are of its columns alone. What the teacher says
    there, renormalised by a softmax, is what the student is to learn, in rows where the target's
    most likely token is among them (``known``), as in EAGLE-3's official code.

    Attributes:
        student_features: ``[R', H]`` or None.
        student_logits: ``[R', V]``.
        teacher_features: ``[R', H]``.
        teacher_logits: ``[R', V]``.
        tokens: ``[R']`` long, the data's next token (-100 where there is none, or the drafter
            cannot propose it).
        generator: for sampled labels.
        slot: ``[R']`` long, place in the block, 0..k-1.
        known: ``[R']`` bool, whether the drafter can propose the target's most likely token; None:
            it can propose all.
        mass: ``[R']``, the target's probability of all tokens that the drafter can propose, in
            validation; None: 1.
        group: ``[R']`` long, block of the row, for an objective with ``whole_groups``: the rows of
            a block are neighbours then, by their slots, and a call has all that count; None: rows
            come in any order.
    """

    student_features: Tensor | None
    student_logits: Tensor
    teacher_features: Tensor
    teacher_logits: Tensor
    tokens: Tensor
    generator: torch.Generator
    slot: Tensor
    known: Tensor | None = None
    mass: Tensor | None = None
    group: Tensor | None = None

    def label(self, tokens: Tensor) -> Tensor:
        """Return labels ``[R']`` that the target gave, -100 in rows that are not ``known``."""
        return tokens if self.known is None else tokens.where(self.known, OUTSIDE)

    def term(self, values: Tensor) -> Tensor:
        """Return a term ``[R']`` that compares distributions, 0 in rows that are not ``known``."""
        return values if self.known is None else values.where(self.known, 0.0)


class Objective(ABC):
    """Turns labelled rows into named loss terms.

    A term of a row depends on that row alone, or on its block: the rows of a step come in as many
    calls as their logits need room (``distillation.logits_mib``), and the terms of all calls count
    together.

    Attributes:
        weights: term name -> weight; the loss is the weighted sum of the terms' means.
        whole_groups: whether a term of a row depends on the other rows of its block, so that they
            must come in one call (``LabelledRows.group``).
    """

    __slots__ = ()
    weights: Mapping[str, float]
    whole_groups: bool = False

    @abstractmethod
    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Compute each term per row, ``[R']``. Names are those of ``weights``."""
