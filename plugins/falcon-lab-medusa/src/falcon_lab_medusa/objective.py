"""Medusa-1's loss: Σ_i decay^i · CE_i over the heads (arXiv 2401.10774, equation 1).

Shapes: R' rows that count, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional

from falcon_lab.interfaces import BuildContext, LabelledRows, Objective
from falcon_lab_medusa import MedusaObjectiveConfig

NO_LABEL = -100


class MedusaObjective(Objective):
    """Compute the loss of ``MedusaObjectiveConfig``, for any drafter with slots.

    Attributes:
        weights: one term. A term counts as the mean over rows, of which every head has as many;
            k times that is the sum over heads.
    """

    def __init__(self, config: MedusaObjectiveConfig, context: BuildContext) -> None:
        self.config = config
        self.weights: Mapping[str, float] = {"medusa": float(max(1, context.block))}

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Return the term per row, ``[R']`` float32; 0 for a row whose label is missing."""
        return {"medusa": self._divergence(rows) * self.config.decay ** (rows.slot + 1)}

    def _divergence(self, rows: LabelledRows) -> Tensor:
        student, teacher = rows.student_logits.float(), rows.teacher_logits.float()
        if self.config.label == "soft":
            # KL(p || q), which is the soft cross-entropy less what the student cannot change.
            log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
            soft = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            return rows.term(soft)
        labels = rows.tokens if self.config.label == "data" else rows.label(teacher.argmax(-1))
        return functional.cross_entropy(student, labels, reduction="none", ignore_index=NO_LABEL)
