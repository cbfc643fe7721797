"""Multiplications and additions that a training step cannot do without.

Shapes: B sequences, T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from falcon_lab.data.batch import Batch
from falcon_lab.drafters.relaxed_mask import find_runs

if TYPE_CHECKING:
    from falcon_lab.distillation.module import Distillation


@dataclass(frozen=True)
class StepCost:
    """Operations of one micro-batch by part; a multiplication and an addition are two.

    Counted from shapes, for tokens that are no padding: matrix products with every weight, and
    attention to the rows that a row sees. A backward pass counts twice its forward pass, through
    the head once, whose weights are frozen. The teacher reads each token once, however often the
    student studies it.

    Attributes:
        teacher: its pass.
        glance: the student's first pass.
        student: its second one, forward and backward.
        heads: the LM head: once a token for the teacher; forward in both of the student's passes,
            and backward.
    """

    teacher: float
    glance: float
    student: float
    heads: float

    @classmethod
    def of(cls, module: Distillation, batch: Batch, *, glances: bool) -> Self:
        """Of a module's step on ``batch``."""
        target, drafter, times = module.target, module.drafter, module.config.repeats
        tokens = int((batch.documents >= 0).sum())
        teacher = _pass(target.backbone, target.config, tokens, batch)
        student = times * _pass(drafter, drafter.backbone.config, tokens, batch)
        head = 2.0 * target.hidden_size * target.vocab_size * tokens
        return cls(
            teacher=teacher,
            glance=student if glances else 0.0,
            student=3 * student,
            heads=head * (1 + times * (3 if glances else 2)),
        )

    @property
    def total(self) -> float:
        """All parts."""
        return self.teacher + self.glance + self.student + self.heads


def _pass(network: nn.Module, config: Any, tokens: int, batch: Batch) -> float:
    tables = {id(m.weight) for m in network.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(p): p for p in network.parameters() if p.dim() > 1 and id(p) not in tables}
    weights = sum(p.numel() for p in matrices.values())
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = size * config.num_attention_heads
    return 2.0 * weights * tokens + 4.0 * width * config.num_hidden_layers * _seen(batch)


def _seen(batch: Batch) -> int:
    """Pairs of a token and one of its document that is not later."""
    runs = find_runs(batch.documents)
    return int((runs.offset[batch.documents >= 0] + 1).sum(dtype=torch.long))
