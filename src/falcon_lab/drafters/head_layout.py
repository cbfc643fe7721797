"""The positions and attention masks of a head's drafting passes.

A round's first pass computes a window: the new tokens, and as many older ones as make the last k
one block. Where a sequence is shorter than a block, padding stands behind the window for the tokens
that are missing before it. A later pass computes a block of k tokens for every branch. Behind the
tokens of a pass stand the queries of a head that has them, k for the window or for each block.

Masks of one sequence are about the last keys alone and all before them are attended to; where the
sequences of a pass are of several lengths, masks are about all keys.

Shapes: R sequences of a pass, T tokens of each, L committed tokens of a sequence, E padding or
queries of a window, F branches, P their blocks in the cache, k block, W columns of a mask, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.model.masks import send


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of several sequences, each followed by its E tokens and then by padding.

    Attributes:
        source: ``[R, T]``, where each token is found: among those that were fused, or among the
            E behind them.
        positions: ``[R, T]``.
        mask: ``[R, T, S]`` bool.
        newest: ``[R, k]`` of the T: those that predict what comes next.
    """

    source: Tensor
    positions: Tensor
    mask: Tensor
    newest: Tensor


class Layout:
    """Positions and masks by the rules of one head.

    Args:
        head: whose block, phase and queries count.
    """

    def __init__(self, head: HeadLayers) -> None:
        self._block, self._aligned = head.block, head.aligned
        self._queries = head.offsets is not None
        self._most = head.host.max_positions
        self._index = torch.empty(0, dtype=torch.long)  # 0, 1, 2, …
        self._positions = self._index  # the same, within the host's positions
        self._aligned_table = torch.empty(0, 0, dtype=torch.bool)

    def start(self, computed: int, length: int) -> int:
        """Return the first token to compute, or to compute again.

        Args:
            computed: tokens whose keys and values are in the cache.
            length: L at the round's first pass.
        """
        if self._queries:
            return min(computed, length - 1)  # keys and values of causal tokens never change
        if not self._aligned:
            computed -= computed % self._block  # a block that was cut short is whole now
        return max(0, min(computed, length - self._block))

    def whole(self, length: int, total: int) -> int:
        """Return how many of L tokens see no further than L, when ``total`` will be there."""
        block = 1 if self._queries else self._block
        stop = min(length, total - self._block)  # the last k predict
        return stop - (stop - total if self._aligned else stop) % block

    def behind(self, length: int) -> int:
        """Return E: queries, or tokens missing at the beginning of a sequence of ``length``."""
        return self._block if self._queries else max(0, self._block - length)

    # --- one sequence -------------------------------------------------------------------------

    def window(
        self, start: int, stop: int, behind: int, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Lay out the window of one sequence.

        Args:
            start: its first token.
            stop: L, the end of the window.
            behind: E.
            device: of the result.

        Returns:
            Positions ``[T]`` and mask ``[T, T]``, or None where every token attends to every key.
        """
        self._reserve(stop + behind, device)
        positions, index = self._positions[start:stop], self._index[start:stop]
        if behind == 0 and self._aligned and not self._queries:
            return positions, self._aligned_mask(stop - start)
        horizon = self._horizon(index, stop)
        if behind:
            newest = stop - 1 if self._queries else 0
            positions = torch.cat([positions, self._positions[newest].expand(behind)])
            horizon = torch.cat([horizon, self._index[stop + behind - 1].expand(behind)])
        return positions, self._index[start : stop + behind] <= horizon.unsqueeze(1)

    def branches(
        self, begin: int, count: int, visible: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Lay out one block for each branch of a sequence.

        Args:
            begin: position of the blocks' first tokens.
            count: F.
            visible: ``[F, P]`` bool, the cached blocks that a branch attends to, and itself; None:
                all of them.
            device: of the result.

        Returns:
            Positions ``[T]``, and mask ``[T, W]`` or None.
        """
        block = self._block
        self._reserve(begin + block, device)
        positions = self._positions[begin : begin + block]
        own = positions if count == 1 else positions.repeat(count)
        if self._queries:
            own = torch.cat([own, positions[-1:].expand(count * block)])
        if visible is None:
            return own, None
        tree = visible.repeat_interleave(block, 0).repeat_interleave(block, 1)
        if not self._queries:
            return own, tree
        causal = tree.new_ones(block, block).tril().repeat(count, count)
        older, newer = tree.split([tree.shape[1] - count * block, count * block], dim=1)
        contexts = torch.cat([older, newer & causal, torch.zeros_like(newer)], dim=1)
        return own, torch.cat([contexts, torch.cat([tree, newer], dim=1)])

    def _reserve(self, count: int, device: torch.device) -> None:
        """Make the tables of positions at least that long."""
        if self._index.shape[0] < count or self._index.device != device:
            self._index = torch.arange(max(count, 2 * self._index.shape[0]), device=device)
            self._positions = self._index.clamp_max(self._most - 1)

    def _horizon(self, index: Tensor, length: int | Tensor) -> Tensor:
        """Return the last token that each token of a window attends to."""
        block = self._block
        if self._queries:
            return index
        if self._aligned:
            behind = (length - 1 - index).div(block, rounding_mode="floor") * block
            return length - 1 - behind
        end = index.div(block, rounding_mode="floor") * block + block - 1
        return torch.minimum(end, torch.as_tensor(length - 1, device=end.device))

    def _aligned_mask(self, count: int) -> Tensor | None:
        """Return ``[T, T]`` out of one table: aligned blocks are counted from the end."""
        if count <= self._block:
            return None
        known = self._aligned_table
        if known.shape[0] < count or known.device != self._index.device:
            index = self._index[:count]
            known = self._aligned_table = index <= self._horizon(index, count).unsqueeze(1)
        return known[-count:, -count:]

    # --- several sequences --------------------------------------------------------------------

    def windows(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        ends: Sequence[int],
        known: int,
        device: torch.device,
    ) -> Windows:
        """Lay out the windows of several sequences.

        Args:
            starts: first token of each window.
            lengths: L.
            ends: where each one's newest token ends among those that were fused.
            known: tokens of each that were fused, the padding counted.
            device: of the result.
        """
        block = self._block
        behinds = [self.behind(length) for length in lengths]
        start, length, end, behind = send([starts, lengths, ends, behinds], device).unsqueeze(-1)
        window = length - start
        total = max(n - s + e for n, s, e in zip(lengths, starts, behinds, strict=True))
        place = torch.arange(total, device=device)
        inside = place < window
        index = start + place
        source = torch.where(inside, end - window + place, known + place - window)
        outside = length - 1 if self._queries else torch.zeros_like(length)
        horizon = torch.where(inside, self._horizon(index, length), length + behind - 1)
        columns = torch.arange(max(starts) + total, device=device)
        newest = window + behind - block + torch.arange(block, device=device)
        if not self._queries and max(behinds):
            # Missing tokens come before the first one, yet are computed behind the last.
            newest = torch.where(behind > 0, (newest + window) % block, newest)
        return Windows(
            source.clamp_max(known + block - 1),
            torch.where(inside, index, outside).clamp_max(self._most - 1),
            columns <= horizon[..., None],
            newest,
        )

    def blocks(
        self,
        visible: Tensor,
        lengths: Sequence[int],
        starts: Sequence[int],
        begins: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Lay out the blocks of several sequences, padded to the most branches.

        Args:
            visible: ``[R, F, P]`` bool, the cached blocks that each block attends to, and itself.
            lengths: L.
            starts: the first new column of each sequence, behind its cached blocks.
            begins: position of each sequence's blocks.

        Returns:
            Positions ``[R, T]`` and mask ``[R, T, S]``.
        """
        _, width, cached = visible.shape
        device, block, new = visible.device, self._block, width * self._block
        places = torch.arange(block, device=device)
        own = send(begins, device)[:, None] + places
        positions = [own.repeat(1, width)]
        if self._queries:
            positions.append(own[:, -1:].expand(-1, new))
        columns = torch.arange(max(starts) + new * len(positions), device=device)
        behind = columns - send(lengths, device)[:, None]  # [R, S]; below 0: committed
        number = behind.div(block, rounding_mode="floor").clamp(0, cached - 1)
        mask = visible.gather(2, number[:, None].expand(-1, width, -1))
        mask = mask & (behind < cached * block)[:, None] | (behind < 0)[:, None]
        mask = mask[:, :, None].expand(-1, -1, block, -1)  # [R, F, k, S]
        masks = [mask]
        if self._queries:
            place = torch.arange(new, device=device).view(width, block)
            column = send(starts, device)[:, None, None] + place  # [R, F, k], of the contexts
            begin = (column[:, :, :1] + new)[..., None]  # column of a block's first query
            queries = mask | (columns >= begin) & (columns < begin + block)
            masks = [mask & (columns <= column[..., None]), queries]
        whole = torch.cat([part.flatten(1, 2) for part in masks], dim=1)
        return torch.cat(positions, dim=1).clamp_max(self._most - 1), whole


@dataclass(frozen=True, slots=True)
class PaddedBlocks:
    """The blocks of several sequences, one after the other or padded to the most of a sequence.

    Attributes:
        counts: F of every sequence.
        firsts: each sequence's first block.
        places: of every block in its sequence.
    """

    counts: list[int]
    firsts: list[int]
    places: list[int]

    @classmethod
    def of(cls, counts: list[int]) -> PaddedBlocks:
        """Make it from F of every sequence."""
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        return cls(counts, firsts, [place for count in counts for place in range(count)])

    @property
    def width(self) -> int:
        """Return the largest F."""
        return max(self.counts)

    def spread(self, values: list[int]) -> list[int]:
        """Turn one value a sequence into one a block."""
        return [
            value for value, count in zip(values, self.counts, strict=True) for _ in range(count)
        ]

    def pad(self, blocks: Tensor) -> Tensor:
        """Turn ``[ΣF, …]`` into ``[R, F, …]``; what stands in the padding does not matter."""
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
        """Turn ``[R, F, …]`` into ``[ΣF, …]``."""
        width, flat = self.width, blocks.flatten(0, 1)
        if min(self.counts) == width:
            return flat
        index = [
            number * width + place
            for number, count in enumerate(self.counts)
            for place in range(count)
        ]
        return flat[send(index, blocks.device)]
