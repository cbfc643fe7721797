"""Coupled Sequential Glancing Distillation: show the drafter the start of some blocks.

Falcon, arXiv 2412.12639 §3.2; the glancing idea is GLAT's. N = λ·d rows are shown, d being the
Hamming distance between the drafter's first pass and the target, as contiguous prefixes of
1..k-1 rows of blocks drawn at random, token and feature together.

Shapes: B batch, R prediction rows, G blocks of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.distillation.blocks import complete_blocks, number_blocks
from falcon_lab.glancing.falling import Falling
from falcon_lab.protocols import GlanceRows


class Csgd(Falling):
    """The schedule of ``CsgdConfig``."""

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Show round(ratio · wrong rows) rows of each sequence, as far as its blocks suffice.

        Only blocks whose k rows all count are used, so that a prefix always helps a row that
        counts. k = 1 has no proper prefix: nothing is ever shown.
        """
        if rows.block == 1 or rows.valid.numel() == 0:
            return torch.zeros_like(rows.valid)
        wanted = (rows.wrong.sum(1) * ratio).round().long()  # [B]
        number, sequence = number_blocks(rows.group)
        full = complete_blocks(rows.valid, number, sequence.shape[0], rows.block)
        prefix = _draw_prefixes(sequence, full, wanted, rows.block, generator)
        return rows.valid & (rows.slot < prefix[number])


def _draw_prefixes(
    sequence: Tensor, full: Tensor, wanted: Tensor, block: int, generator: torch.Generator
) -> Tensor:
    """``[G]`` long, rows shown of each block: 1..k-1, or 0 for a block that was not drawn.

    Args:
        sequence: ``[G]`` long, sequence of each block, ascending.
        full: ``[G]`` bool, blocks that may be drawn.
        wanted: ``[B]`` long, rows to show in each sequence.
        block: k.
        generator: source of the draws.
    """
    count, device = sequence.shape[0], sequence.device
    place = generator.device
    priority = torch.rand(count, generator=generator, device=place, dtype=torch.float64)
    length = torch.randint(1, block, (count,), generator=generator, device=place).to(device)
    length = length * full
    # Sequence by sequence in random order, prefixes are taken until enough rows are shown; the
    # last one is cut to fit.
    order = (sequence + priority.to(device)).argsort()
    taken = length[order].cumsum(0) - length[order]
    first = torch.searchsorted(sequence, sequence)  # sequence is sorted, so order keeps it
    left = wanted[sequence] - (taken - taken[first])
    shown = torch.minimum(length[order], left.clamp_min(0))
    return torch.zeros_like(length).scatter_(0, order, shown)
