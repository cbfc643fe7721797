"""No glancing: one pass, nothing shown.

Shapes: B batch, R prediction rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from falcon_lab.protocols import BuildContext, GlanceRows


class NoGlancing:
    """The schedule that reveals nothing (token-shift training, as EAGLE's)."""

    token_source: Literal["target", "data"] = "target"
    keep_revealed_in_loss = True

    def __init__(self, config: object, context: BuildContext) -> None:
        pass

    def ratio(self, progress: float) -> float:
        """Always 0."""
        return 0.0

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """``[B, R]``, all False."""
        return torch.zeros_like(rows.valid)
