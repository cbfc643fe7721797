"""A constant ratio for the first part of the training, then nothing.

Shapes: B batch, R prediction rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, GlanceRows, GlancingSchedule
from falcon_lab_sample import StepConfig


class Step(GlancingSchedule):
    """Shows each wrong row but a block's last with probability λ."""

    keep_revealed_in_loss = False

    def __init__(self, config: StepConfig, context: BuildContext) -> None:
        self._config = config

    def ratio(self, progress: float) -> float:
        """λ until ``until``, then 0."""
        return self._config.ratio if progress < self._config.until else 0.0

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """``[B, R]`` bool."""
        draws = torch.rand(rows.wrong.shape, generator=generator, device=generator.device)
        return rows.wrong & (rows.slot < rows.block - 1) & (draws.to(rows.wrong.device) < ratio)
