"""Blocks of packed documents and the masks that follow from them.

Shapes: B batch, T rows, A anchors, k block, D documents of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Runs:
    """The documents of a packed batch, each a run of neighbouring rows.

    Attributes:
        number: ``[B, T]`` long, the run of each row, unique in the batch.
        offset: ``[B, T]`` long, the row's place in its run.
        count: D, runs in the batch.
        longest: rows of the longest run.
    """

    number: Tensor
    offset: Tensor
    count: int
    longest: int

    def unpack(self, rows: Tensor) -> Tensor:
        """``[B, T, C]`` -> ``[D, longest, C]``, zeros behind the end of a run."""
        padded = rows.new_zeros(self.count, self.longest, rows.shape[-1])
        return padded.index_put((self.number, self.offset), rows)

    def pack(self, padded: Tensor) -> Tensor:
        """``[D, longest, C]`` -> ``[B, T, C]``: the inverse of ``unpack``."""
        return padded[self.number, self.offset]


def find_runs(documents: Tensor) -> Runs:
    """The runs of equal ids in ``documents`` ``[B, T]``; a run never crosses sequences."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    number = (starts.flatten().cumsum(0) - 1).view_as(documents)
    column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    start = torch.where(starts, column, 0).cummax(1).values
    offset = column - start
    return Runs(number, offset, int(number[-1, -1]) + 1, int(offset.max()) + 1)


class Blocks(NamedTuple):
    """The block of every row.

    Attributes:
        slot: ``[B, T]`` long, place in the block, 0..k-1.
        group: ``[B, T]`` long, number of the block in its sequence, growing with time; a
            document's first and last blocks may be incomplete.
    """

    slot: Tensor
    group: Tensor


def divide(runs: Runs, positions: Tensor, phase: Tensor, block: int) -> Blocks:
    """Blocks of k rows: row t is in block floor((position + phase) / k) of its document.

    Args:
        runs: the documents.
        positions: ``[B, T]`` long, position of each row in its document.
        phase: ``[B, T]`` long, how far the document's first block is cut, 0..k-1.
        block: k.
    """
    slot = (positions + phase) % block
    starts = (slot == 0) | (runs.offset == 0)
    return Blocks(slot, starts.cumsum(1) - 1)


def relaxed_causal_mask(runs: Runs, blocks: Blocks) -> Tensor:
    """``[B, T, T]`` bool: row i sees row j of its document iff block(j) <= block(i).

    Falcon's relaxed causal mask (arXiv 2412.12639 §3.2); k = 1 is the causal mask.
    """
    same = runs.number.unsqueeze(2) == runs.number.unsqueeze(1)
    return same & (blocks.group.unsqueeze(1) <= blocks.group.unsqueeze(2))


class Anchors(NamedTuple):
    """The newest row of every complete block, padded to A a sequence.

    Attributes:
        column: ``[B, A]`` long, the row (0 where there is none).
        present: ``[B, A]`` bool.
    """

    column: Tensor
    present: Tensor


def find_anchors(blocks: Blocks, block: int) -> Anchors:
    """The rows at slot k - 1. A is at least 1, so that there is always something to compute."""
    newest = blocks.slot == block - 1
    most = max(1, int(newest.sum(1).max()))
    # A stable sort on "is no anchor" brings the anchors to the front in their order.
    column = newest.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    present = newest.gather(1, column)
    return Anchors(column.masked_fill(~present, 0), present)


def query_mask(runs: Runs, anchors: Anchors, block: int) -> Tensor:
    """``[B, T + A*k, T + A*k]`` bool: T causal context rows, then k queries an anchor.

    A query sees its document's rows up to its anchor and the queries of its own anchor; nothing
    but these sees a query.
    """
    batch, rows = runs.number.shape
    column = torch.arange(rows, device=runs.number.device)
    same = runs.number.unsqueeze(2) == runs.number.unsqueeze(1)
    context = same & (column <= column.unsqueeze(1))
    # What the queries see of the context is what their anchor's row sees.
    seen = context.gather(1, anchors.column.unsqueeze(2).expand(-1, -1, rows))
    queries = anchors.column.shape[1] * block
    owner = torch.arange(queries, device=column.device) // block
    own = (owner.unsqueeze(1) == owner).expand(batch, -1, -1)
    above = torch.cat([context, context.new_zeros(batch, rows, queries)], dim=2)
    below = torch.cat([seen.repeat_interleave(block, dim=1), own], dim=2)
    return torch.cat([above, below], dim=1)
