"""Where the rows of a batched drafting pass come from and go to.

Shapes: R rows of a pass (sequences), L committed rows of a sequence, T rows that a pass computes of
each, F frontier blocks, Q provisional blocks, k block, S columns, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.targets.sending import send

if TYPE_CHECKING:
    from falcon_lab.drafters.feature_head import FeatureHead


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the rows of a first pass come from, and what they see.

    A sequence's T rows are its window, then its extra rows, then padding.

    Attributes:
        source: ``[R, T]`` of the known rows and the extra ones behind them.
        positions: ``[R, T]``.
        mask: ``[R, T, S]`` bool.
        newest: ``[R, k]`` of the T: those that predict what comes next.
    """

    source: Tensor
    positions: Tensor
    mask: Tensor
    newest: Tensor

    @classmethod
    def of(
        cls,
        starts: list[int],
        lengths: list[int],
        ends: list[int],
        drafter: FeatureHead,
        known: int,
        device: torch.device,
    ) -> Windows:
        """Lay windows out.

        Args:
            starts: first row of each window.
            lengths: L.
            ends: where each one's newest row ends among its known ones.
            drafter: whose rules hold.
            known: known rows, the padding counted.
            device: of the result.
        """
        block, queries = drafter.block, drafter.offsets is not None
        extras = [block if queries else max(0, block - length) for length in lengths]
        start, length, end, extra = send([starts, lengths, ends, extras], device).unsqueeze(-1)
        window = length - start
        total = max(n - s + e for n, s, e in zip(lengths, starts, extras, strict=True))
        row = torch.arange(total, device=device)
        inside = row < window
        index = start + row
        source = torch.where(inside, end - window + row, known + row - window)
        # Missing rows come before the first one, yet are computed behind the last.
        outside = length - 1 if queries else torch.zeros_like(length)
        horizon = torch.where(inside, _horizon(index, length, drafter), length + extra - 1)
        columns = torch.arange(max(starts) + total, device=device)
        newest = window + extra - block + torch.arange(block, device=device)
        if not queries and max(extras):
            newest = torch.where(extra > 0, (newest + window) % block, newest)
        return cls(
            source.clamp_max(known + block - 1),
            torch.where(inside, index, outside).clamp_max(drafter.host.max_positions - 1),
            columns <= horizon[..., None],
            newest,
        )


def _horizon(index: Tensor, length: Tensor, drafter: FeatureHead) -> Tensor:
    """The last row that each row of a window sees."""
    block = drafter.block
    if drafter.offsets is not None:
        return index
    if drafter.aligned:
        behind = (length - 1 - index).div(block, rounding_mode="floor") * block
        return length - 1 - behind
    end = index.div(block, rounding_mode="floor") * block + block - 1
    return torch.minimum(end, length - 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a pass, row after row or padded to the widest row.

    Attributes:
        counts: F of every row.
        firsts: each row's first block.
        places: of every block in its row.
    """

    counts: list[int]
    firsts: list[int]
    places: list[int]

    @classmethod
    def of(cls, counts: list[int]) -> Blocks:
        """From F of every row."""
        firsts = [sum(counts[:row]) for row in range(len(counts))]
        return cls(counts, firsts, [place for count in counts for place in range(count)])

    @property
    def width(self) -> int:
        """F of the widest row."""
        return max(self.counts)

    def spread(self, values: list[int]) -> list[int]:
        """One value a row -> one a block."""
        return [
            value for value, count in zip(values, self.counts, strict=True) for _ in range(count)
        ]

    def pad(self, blocks: Tensor) -> Tensor:
        """``[ΣF, …]`` -> ``[R, F, …]``; what stands in the padding does not matter."""
        width = self.width
        if min(self.counts) < width:
            index = [
                first + min(place, count - 1)
                for first, count in zip(self.firsts, self.counts, strict=True)
                for place in range(width)
            ]
            blocks = blocks[send(index, blocks.device)]
        return blocks.unflatten(0, (-1, width))

    def unpad(self, blocks: Tensor) -> Tensor:
        """``[R, F, …]`` -> ``[ΣF, …]``."""
        width, flat = self.width, blocks.flatten(0, 1)
        if min(self.counts) == width:
            return flat
        index = [
            row * width + place for row, count in enumerate(self.counts) for place in range(count)
        ]
        return flat[send(index, blocks.device)]


def block_mask(
    visible: Tensor, lengths: list[int], starts: list[int], block: int, *, queries: bool
) -> Tensor:
    """Who sees whom in a later pass: the committed rows, the blocks on the way, the block itself.

    Args:
        visible: ``[R, F, Q]`` bool, the provisional blocks that each block sees, itself too.
        lengths: L.
        starts: the first new column of each row, behind the blocks of the passes before.
        block: k.
        queries: the blocks are contexts, causal in themselves; k queries of each come behind all
            of them and see its context and one another.

    Returns:
        ``[R, F·k, S]`` bool, with queries ``[R, 2·F·k, S]``.
    """
    _, width, seen = visible.shape
    device, new = visible.device, width * block
    columns = torch.arange(max(starts) + (2 * new if queries else new), device=device)
    behind = columns - send(lengths, device)[:, None]  # [R, S]; below 0: committed
    number = behind.div(block, rounding_mode="floor").clamp(0, seen - 1)
    sees = visible.gather(2, number[:, None].expand(-1, width, -1))
    sees = sees & (behind < seen * block)[:, None] | (behind < 0)[:, None]
    sees = sees[:, :, None].expand(-1, -1, block, -1)  # [R, F, k, S]
    if not queries:
        return sees.flatten(1, 2)
    place = torch.arange(new, device=device).view(width, block)
    own = send(starts, device)[:, None, None] + place  # [R, F, k] columns
    context = sees & (columns <= own[..., None])
    begin = (own[:, :, :1] + new)[..., None]  # column of a block's first query
    query = sees | (columns >= begin) & (columns < begin + block)
    return torch.cat([context.flatten(1, 2), query.flatten(1, 2)], dim=1)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``[R, n, H]`` rows by ``[R, T]`` -> ``[R, T, H]``."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
