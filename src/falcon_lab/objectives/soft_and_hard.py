"""Divergence from the teacher and cross-entropy with a token, from one softmax of each.

Three tensors of logits' size live in the forward pass and two go on to the backward pass, where
plain operations would take and keep about twice as many; most of the time of a large vocabulary
is their memory traffic.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

NO_LABEL = -100
"""Label of a row without one."""


def soft_and_hard(student: Tensor, teacher: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) and -log q[label] of each row, q being the student's distribution.

    Args:
        student: ``[n, V]`` logits, to which gradients flow.
        teacher: ``[n, V]`` logits of p, to which none do.
        labels: ``[n]`` long; ``NO_LABEL`` gives 0.

    Returns:
        Two ``[n]``.
    """
    soft, hard = _SoftAndHard.apply(student, teacher, labels)
    return soft, hard


class _SoftAndHard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
        labelled, index = labels != NO_LABEL, labels.clamp_min(0).unsqueeze(1)
        hard = -log_q.gather(1, index).squeeze(1).masked_fill(~labelled, 0.0)
        p = log_p.exp()
        soft = log_p.sub_(log_q).mul_(p).sum(-1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(log_q.exp_(), p, labelled, index)
        return soft, hard

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_soft: Tensor, of_hard: Tensor) -> tuple[Tensor | None, ...]:
        q, p, labelled, index = ctx.saved_tensors
        of_soft, of_hard = of_soft.unsqueeze(1), (of_hard * labelled).unsqueeze(1)
        # d KL / d logits = q - p, and d CE / d logits = q - one-hot.
        gradient = q * (of_soft + of_hard)
        gradient.addcmul_(p, of_soft, value=-1).scatter_add_(1, index, -of_hard)
        return gradient, None, None
