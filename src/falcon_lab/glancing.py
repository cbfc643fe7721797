"""Glancing schedules: what the student pass of a training step is shown of its labels.

- ``csgd`` (Falcon, arXiv 2412.12639 §3.2): N = λ·d rows are revealed, d being the Hamming distance
  between the drafter's first pass and the target, as contiguous prefixes of 1..k-1 rows of blocks
  drawn at random, token and feature together.
- ``random`` (GLAT, arXiv 2008.07905 §3.2): as many rows, wherever they are.
- ``none``: one pass, nothing is revealed.
- ``valid_prefix`` (SpecBlock): another schedule's glances; the rows of a block after its first
  wrong one leave the loss, since decoding discards what follows a rejected token.

Shapes: B batch, R prediction rows, G blocks of the whole batch, k block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, GlanceRows, GlancingSchedule

if TYPE_CHECKING:
    from falcon_lab.plugins.builtins import CsgdConfig, ValidPrefixConfig


class LinearDecay(GlancingSchedule):
    """A schedule whose ratio λ changes linearly; a subclass chooses the rows (``reveal``).

    Args:
        config: the ratio's ends and the switches.
        context: gives k. With k = 1 a block has no second row that a revealed one could help.
    """

    def __init__(self, config: CsgdConfig, context: BuildContext) -> None:
        self.token_source = cast(Literal["target", "data"], config.tokens)
        self.keep_revealed_in_loss = config.revealed_in_loss
        self._start, self._end = config.start, config.end
        self._possible = context.block != 1

    def ratio(self, progress: float) -> float:
        """Return λ between ``start`` and ``end``; 0 where k = 1."""
        if not self._possible:
            return 0.0
        return self._start + (self._end - self._start) * min(max(progress, 0.0), 1.0)


class NoGlancing(GlancingSchedule):
    """The schedule that reveals nothing (token-shift training, as EAGLE's)."""

    def __init__(self, config: object, context: BuildContext) -> None:
        pass

    def ratio(self, progress: float) -> float:
        """Return 0: no first pass is needed."""
        return 0.0

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Reveal nothing: ``[B, R]``, all False."""
        return torch.zeros_like(rows.valid)


class RandomGlancing(LinearDecay):
    """Reveals rows at random places (``RandomConfig``)."""

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Reveal round(ratio · wrong rows) of each sequence's valid rows, any of them."""
        if rows.block == 1:
            return torch.zeros_like(rows.valid)
        wanted = (rows.wrong.sum(1, keepdim=True) * ratio).round()  # [B, 1]
        drawn = torch.rand(
            rows.valid.shape, generator=generator, device=generator.device, dtype=torch.float64
        )
        drawn = drawn.to(rows.valid.device).masked_fill(~rows.valid, 2.0)
        rank = drawn.argsort(dim=1).argsort(dim=1)
        return rows.valid & (rank < wanted)


class Csgd(LinearDecay):
    """Reveals prefixes of blocks (``CsgdConfig``)."""

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Reveal round(ratio · wrong rows) rows of each sequence, as far as its blocks suffice.

        Only blocks whose k rows are all valid are used, so that a prefix always helps a row that
        is in the loss. k = 1 has no proper prefix: nothing is ever revealed.
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
    """Return ``[G]`` long, rows to reveal of each block: 1..k-1, or 0 where it was not drawn.

    Args:
        sequence: ``[G]`` long, sequence of each block, ascending.
        full: ``[G]`` bool, blocks that may be drawn.
        wanted: ``[B]`` long, rows to reveal in each sequence.
        block: k.
        generator: source of the draws.
    """
    count, device = sequence.shape[0], sequence.device
    place = generator.device
    priority = torch.rand(count, generator=generator, device=place, dtype=torch.float64)
    length = torch.randint(1, block, (count,), generator=generator, device=place).to(device)
    length = length * full
    # Sequence by sequence in random order, prefixes are taken until enough rows are revealed; the
    # last one is cut to fit.
    order = (sequence + priority.to(device)).argsort()
    taken = length[order].cumsum(0) - length[order]
    first = torch.searchsorted(sequence, sequence)  # sequence is sorted, so order keeps it
    left = wanted[sequence] - (taken - taken[first])
    revealed = torch.minimum(length[order], left.clamp_min(0))
    return torch.zeros_like(length).scatter_(0, order, revealed)


class ValidPrefix(GlancingSchedule):
    """Another schedule's glances, and the mask of the loss (``ValidPrefixConfig``)."""

    def __init__(self, config: ValidPrefixConfig, context: BuildContext) -> None:
        if context.components is None:
            raise FalconLabError("valid_prefix is built by the registry, which knows its schedule")
        inner: GlancingSchedule = context.components.build("schedule", config.schedule, context)
        self._inner = inner
        self.token_source = inner.token_source
        self.keep_revealed_in_loss = inner.keep_revealed_in_loss

    def ratio(self, progress: float) -> float:
        """Return λ of the inner schedule."""
        return self._inner.ratio(progress)

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """Reveal what the inner schedule reveals."""
        return self._inner.reveal(rows, ratio, generator)

    def counts(self, rows: GlanceRows) -> Tensor:
        """Return ``[B, R]`` bool: rows with no wrong row of their block before them.

        A block's first wrong row itself stays in the loss: it is the one to correct.
        """
        valid = self._inner.counts(rows)
        number, sequence = number_blocks(rows.group)
        place = torch.where(rows.wrong & rows.valid, rows.slot, rows.block)
        first = place.new_full((sequence.shape[0],), rows.block)
        first.scatter_reduce_(0, number.flatten(), place.flatten(), "amin")
        return valid & (rows.slot <= first[number])


def number_blocks(group: Tensor) -> tuple[Tensor, Tensor]:
    """Number the blocks of a batch, sequence by sequence.

    Args:
        group: ``[B, R]`` long, equal within a block, unique in the sequence.

    Returns:
        ``[B, R]`` long, the number of each row's block in the batch, and ``[G]`` long, the
        sequence of each block.
    """
    low = group.min()
    span = group.max() - low + 1
    sequence = torch.arange(group.shape[0], device=group.device).unsqueeze(1)
    keys, number = torch.unique(group - low + sequence * span, return_inverse=True)
    return number, keys.div(span, rounding_mode="floor")


def complete_blocks(valid: Tensor, number: Tensor, count: int, block: int) -> Tensor:
    """Return ``[G]`` bool: the blocks whose k rows are all valid.

    Args:
        valid: ``[B, R]`` bool.
        number: ``[B, R]`` long, as ``number_blocks`` gives it.
        count: G.
        block: k.
    """
    sizes = torch.zeros(count, dtype=torch.long, device=valid.device)
    return sizes.index_add_(0, number.flatten(), valid.flatten().long()) == block
