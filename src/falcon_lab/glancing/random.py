"""Glancing at random: GLAT's own schedule, which CSGD is compared with.

GLAT, arXiv 2008.07905 §3.2: as many rows are shown as the ratio times the Hamming distance between
the first pass and the target, wherever they stand. CSGD shows prefixes of blocks instead.

Shapes: B batch, R prediction rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.glancing.falling import Falling
from falcon_lab.protocols import GlanceRows


class RandomGlancing(Falling):
    """The schedule of ``RandomConfig``."""

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Show round(ratio · wrong rows) of each sequence's rows that count, any of them."""
        if rows.block == 1:
            return torch.zeros_like(rows.valid)
        wanted = (rows.wrong.sum(1, keepdim=True) * ratio).round()  # [B, 1]
        drawn = torch.rand(
            rows.valid.shape, generator=generator, device=generator.device, dtype=torch.float64
        )
        drawn = drawn.to(rows.valid.device).masked_fill(~rows.valid, 2.0)
        rank = drawn.argsort(dim=1).argsort(dim=1)
        return rows.valid & (rank < wanted)
