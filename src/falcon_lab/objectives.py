"""Falcon's distillation loss: feature regression, soft labels and hard labels.

L = SmoothL1 + 0.1·(0.9·KL + 0.1·CE), arXiv 2412.12639 §3.2, equations 1-8.

Shapes: n rows, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, LabelledRows, Objective
from falcon_lab.interfaces.vocabulary import OUTSIDE
from falcon_lab.sampling import most_likely

if TYPE_CHECKING:
    from falcon_lab.plugins.builtins import FalconObjectiveConfig

NO_LABEL = OUTSIDE
"""Label of a row without one."""
FLOOR = 1e-8
"""Added to the drafter's probabilities in the tempered form, as upstream does."""


class FalconObjective(Objective):
    """Computes the terms of ``FalconObjectiveConfig``, those whose weight is not zero.

    Attributes:
        weights: of ``feature``, ``soft`` and ``hard``.
    """

    def __init__(self, config: FalconObjectiveConfig, context: BuildContext) -> None:
        self.config = config
        terms = {"feature": config.feature, "soft": config.soft, "hard": config.hard}
        self.weights: Mapping[str, float] = {name: w for name, w in terms.items() if w}

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Compute each term per row, ``[n]`` float32."""
        terms = self._from_logits(rows) if self.weights.keys() & {"soft", "hard"} else {}
        if "feature" in self.weights:
            terms["feature"] = self._feature(rows)
        if self.config.slot_decay != 1:
            weight = self.config.slot_decay**rows.slot
            terms = {name: term * weight for name, term in terms.items()}
        return {name: terms[name] for name in self.weights}

    def _feature(self, rows: LabelledRows) -> Tensor:
        """Return SmoothL1 (or the squared distance) between the features, a mean over H."""
        if rows.student_features is None:
            raise FalconLabError(
                "objective.feature: this drafter predicts tokens and no features; "
                "set objective.feature=0"
            )
        squared = self.config.feature_form == "mse"
        distance = functional.mse_loss if squared else functional.smooth_l1_loss
        student, teacher = rows.student_features.float(), rows.teacher_features.float()
        return distance(student, teacher, reduction="none").mean(-1)

    def _from_logits(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Return the terms that read logits.

        ``soft`` is KL(p || q), Σ|p - q|, or upstream's tempered mixture; ``hard`` is the
        cross-entropy with one token a row, 0 where there is no token.
        """
        student, teacher = rows.student_logits, rows.teacher_logits
        terms = {}
        if self.config.hard:
            labels = self._labels(rows)
        else:
            labels = rows.tokens.new_full(rows.tokens.shape, NO_LABEL)
        if self.config.soft and self.config.soft_form == "kl":
            soft, terms["hard"] = soft_and_hard(student, teacher, labels)
            return {**terms, "soft": rows.term(soft)}
        student = _single(student)
        if self.config.soft:
            compare = _l1 if self.config.soft_form == "l1" else self._tempered
            terms["soft"] = rows.term(compare(student, _single(teacher)))
        if self.config.hard:
            terms["hard"] = functional.cross_entropy(
                student, labels, reduction="none", ignore_index=NO_LABEL
            )
        return terms

    def _tempered(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return upstream's soft term, which is not a divergence."""
        temperature = self.config.temperature
        log_p = (teacher / temperature).log_softmax(-1)
        log_q = ((student / temperature).softmax(-1) + FLOOR).log()
        return (teacher.softmax(-1) * (log_p - log_q)).sum(-1)

    def _labels(self, rows: LabelledRows) -> Tensor:
        if self.config.hard_label == "data":
            return rows.tokens
        if self.config.hard_label == "argmax":
            return rows.label(most_likely(rows.teacher_logits))
        # By the inverse of the distribution function, so that the generator's device is free.
        total = rows.teacher_logits.double().softmax(-1).cumsum(-1)
        point = torch.rand(
            total.shape[0], 1, generator=rows.generator, device=rows.generator.device
        )
        drawn = torch.searchsorted(total, point.to(total) * total[:, -1:], right=True).squeeze(-1)
        return rows.label(drawn.clamp_max(total.shape[-1] - 1))


def _l1(student: Tensor, teacher: Tensor) -> Tensor:
    """Return Σ|p - q| of each row."""
    return (teacher.softmax(-1) - student.softmax(-1)).abs().sum(-1)


def soft_and_hard(student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) and -log q[label] of each row, q being the drafter's distribution.

    Most of the time of a large vocabulary is memory traffic, which is kept low in two ways. Only
    the logits are kept for the backward pass, in the dtype in which they came, and p and q are
    computed again. And on a CPU both passes go through a few rows at a time, so that all between
    the logits and the result stays in the processor's cache.

    Args:
        student: ``[n, V]`` logits, to which gradients flow.
        teacher: ``[n, V]`` logits of p, to which none do.
        labels: ``[n]`` long; ``NO_LABEL`` gives 0.

    Returns:
        Two ``[n]``, in float32 where the logits are of half precision.
    """
    soft, hard = _SoftAndHard.apply(student, teacher, labels)
    return soft, hard


CACHED = 2**19
"""Logits that a CPU compares at a time: a few tensors of them fit into the cores' caches."""


class _SoftAndHard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(student, teacher, labels)
        parts = [_compared(*part) for part in _few_rows(student, teacher, labels)]
        soft, hard = (torch.cat(terms) for terms in zip(*parts, strict=True))
        return soft, hard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_soft: Tensor, of_hard: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        gradient = torch.empty_like(kept[0])
        for into, *part in _few_rows(gradient, *kept, of_soft, of_hard):
            into.copy_(_gradient(*part))
        return gradient, None, None


def _few_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of all tensors, a few at a time; at once where they are on a GPU."""
    logits = tensors[0]
    rows = max(1, CACHED // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _compared(student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_q, log_p = _log_softmax(student), _log_softmax(teacher)
    index = labels.clamp_min(0).unsqueeze(1)
    hard = -log_q.gather(1, index).squeeze(1).masked_fill(labels == NO_LABEL, 0.0)
    p = log_p.exp()
    return log_p.sub_(log_q).mul_(p).sum(-1), hard


def _gradient(
    student: Tensor, teacher: Tensor, labels: Tensor, of_soft: Tensor, of_hard: Tensor
) -> Tensor:
    """d KL / d logits = q - p, and d CE / d logits = q - one-hot."""
    q, p = _single(student).softmax(-1), _single(teacher).softmax(-1)
    of_soft, of_hard = of_soft.unsqueeze(1), (of_hard * (labels != NO_LABEL)).unsqueeze(1)
    gradient = q.mul_(of_soft + of_hard).addcmul_(p, of_soft, value=-1)
    return gradient.scatter_add_(1, labels.clamp_min(0).unsqueeze(1), -of_hard)


def _log_softmax(logits: Tensor) -> Tensor:
    return _single(logits).log_softmax(-1)


def _single(logits: Tensor) -> Tensor:
    """Return logits in single precision at the least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
