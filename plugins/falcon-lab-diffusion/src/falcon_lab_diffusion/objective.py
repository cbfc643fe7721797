"""The bound that masked diffusion is trained by, and the streak of SpecDiff-2.

Shapes: n rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.interfaces import BuildContext, LabelledRows, Objective
from falcon_lab.sampling import most_likely
from falcon_lab_diffusion import MdlmConfig

NO_LABEL = -100


class MdlmObjective(Objective):
    """Compute the terms of ``MdlmConfig`` whose weight is not zero.

    ``bound`` is -log q of a hidden token; with the weights 1/t of the rows its mean is the bound of
    masked diffusion (MDLM, arXiv 2406.07524; SpecDiff, arXiv 2408.05636). ``streak`` of the row at
    place j is -Π_{i≤j} q_i of the target's most likely tokens: the sum over a block is less than
    nothing by how many tokens of it are accepted in a row, expected over drafts.

    Attributes:
        weights: of ``bound`` and ``streak``.
        whole_groups: whether there is a streak.

    Args:
        config: the options.
        context: not needed.
    """

    def __init__(self, config: MdlmConfig, context: BuildContext) -> None:
        del context
        self._label = config.label
        terms = {"bound": config.bound, "streak": config.streak}
        self.weights: Mapping[str, float] = {name: w for name, w in terms.items() if w}
        self.whole_groups = config.streak > 0

    def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
        """Return each term per row, ``[n]``; 0 for a row whose label is missing."""
        terms = {}
        if "bound" in self.weights:
            terms["bound"] = self._bound(rows)
        if "streak" in self.weights:
            terms["streak"] = streaks(rows)
        return terms

    def _bound(self, rows: LabelledRows) -> Tensor:
        student = rows.student_logits.float()
        if self._label == "soft":
            p = rows.teacher_logits.float().softmax(-1)
            return rows.term(-(p * student.log_softmax(-1)).sum(-1))
        return functional.cross_entropy(
            student, self._labels(rows), reduction="none", ignore_index=NO_LABEL
        )

    def _labels(self, rows: LabelledRows) -> Tensor:
        if self._label == "data":
            return rows.tokens
        return rows.label(most_likely(rows.teacher_logits))


def streaks(rows: LabelledRows) -> Tensor:
    """Return -Π_{i≤j} q_i(target's token) of each row j, ``[n]``, over its block's rows.

    A row whose token the drafter cannot propose ends the streak.
    """
    assert rows.group is not None
    if not len(rows.slot):
        return rows.student_logits.sum(-1)
    labels = rows.label(most_likely(rows.teacher_logits))
    log_q = rows.student_logits.double().log_softmax(-1)
    log_q = log_q.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1)
    # A sum that goes on from block to block, less what it was where the row's block began.
    whole = log_q.cumsum(0)
    sizes: Tensor = torch.unique_consecutive(rows.group, return_counts=True)[1]
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    known = (labels < 0).long().cumsum(0)
    ended = known - (known - (labels < 0).long())[starts] > 0
    streak = (whole - (whole - log_q)[starts]).exp().masked_fill(ended, 0.0)
    return -streak.float()
