"""Divide packed documents into blocks, and make the attention masks that follow from them.

Shapes: B batch, T tokens, A anchors, k block, D documents of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """Hold where the documents of a packed batch are.

    Attributes:
        number: ``[B, T]`` long, the document of each token, unique in the batch.
        offset: ``[B, T]`` long, the token's place in its document.
        count: D.
        longest: tokens of the longest document.
    """

    number: Tensor
    offset: Tensor
    count: int
    longest: int

    def unpack(self, inputs: Tensor) -> Tensor:
        """Turn ``[B, T, C]`` into ``[D, longest, C]``, with zeros behind the end of a document."""
        padded = inputs.new_zeros(self.count, self.longest, inputs.shape[-1])
        return padded.index_put((self.number, self.offset), inputs)

    def pack(self, padded: Tensor) -> Tensor:
        """Turn ``[D, longest, C]`` into ``[B, T, C]``: the inverse of ``unpack``."""
        return padded[self.number, self.offset]


def find_documents(ids: Tensor) -> PackedDocuments:
    """Find the documents, neighbours of equal id in ``ids`` ``[B, T]``; none crosses sequences."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    number = (starts.flatten().cumsum(0) - 1).view_as(ids)
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    start = torch.where(starts, column, 0).cummax(1).values
    offset = column - start
    return PackedDocuments(number, offset, int(number[-1, -1]) + 1, int(offset.max()) + 1)


class Blocks(NamedTuple):
    """Hold the block of every token.

    Attributes:
        slot: ``[B, T]`` long, place in the block, 0..k-1.
        group: ``[B, T]`` long, number of the block in its sequence, growing with time; a
            document's first and last blocks may be incomplete.
    """

    slot: Tensor
    group: Tensor


def divide(documents: PackedDocuments, positions: Tensor, phase: Tensor, block: int) -> Blocks:
    """Divide documents into blocks of k: token t is in block floor((position + phase) / k).

    Args:
        documents: the documents.
        positions: ``[B, T]`` long, position of each token in its document.
        phase: ``[B, T]`` long, how far the document's first block is cut, 0..k-1.
        block: k.
    """
    slot = (positions + phase) % block
    starts = (slot == 0) | (documents.offset == 0)
    return Blocks(slot, starts.cumsum(1) - 1)


def relaxed_causal_mask(documents: PackedDocuments, blocks: Blocks) -> Tensor:
    """Return ``[B, T, T]`` bool: token i attends to j of its document iff block(j) <= block(i).

    Falcon's relaxed causal mask (arXiv 2412.12639 §3.2); k = 1 is the causal mask.
    """
    same = documents.number.unsqueeze(2) == documents.number.unsqueeze(1)
    return same & (blocks.group.unsqueeze(1) <= blocks.group.unsqueeze(2))


class Anchors(NamedTuple):
    """Hold the newest token of every complete block, padded to A a sequence.

    Attributes:
        column: ``[B, A]`` long, the token (0 where there is none).
        present: ``[B, A]`` bool.
    """

    column: Tensor
    present: Tensor


def find_anchors(blocks: Blocks, block: int) -> Anchors:
    """Find the tokens at slot k - 1. A is at least 1, so that there is always one to compute."""
    newest = blocks.slot == block - 1
    most = max(1, int(newest.sum(1).max()))
    # A stable sort on "is no anchor" brings the anchors to the front in their order.
    column = newest.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    present = newest.gather(1, column)
    return Anchors(column.masked_fill(~present, 0), present)


def query_mask(
    documents: PackedDocuments, anchors: Anchors, block: int, *, contexts: bool = True
) -> Tensor:
    """Return ``[B, T + A*k, T + A*k]`` bool: T causal tokens, then k queries an anchor.

    A query attends to its document up to its anchor and to the queries of its own anchor; nothing
    else attends to a query.

    Args:
        documents: the documents.
        anchors: of the queries.
        block: k.
        contexts: whether anything reads what tokens attend to; else each attends to itself alone.
    """
    batch, tokens = documents.number.shape
    column = torch.arange(tokens, device=documents.number.device)
    same = documents.number.unsqueeze(2) == documents.number.unsqueeze(1)
    context = same & (column <= column.unsqueeze(1))
    # Queries attend to the context that their anchor attends to.
    seen = context.gather(1, anchors.column.unsqueeze(2).expand(-1, -1, tokens))
    queries = anchors.column.shape[1] * block
    owner = torch.arange(queries, device=column.device) // block
    own = (owner.unsqueeze(1) == owner).expand(batch, -1, -1)
    above = torch.cat([context, context.new_zeros(batch, tokens, queries)], dim=2)
    below = torch.cat([seen.repeat_interleave(block, dim=1), own], dim=2)
    return torch.cat([above if contexts else itself_alone(above), below], dim=1)


def itself_alone(mask: Tensor, before: int = 0) -> Tensor:
    """Return a mask of the same size: query i attends to key ``before + i``, its own, alone."""
    queries, keys = mask.shape[1:]
    alone = torch.eye(queries, dtype=torch.bool, device=mask.device)
    behind = keys - before - queries
    return functional.pad(alone, (before, behind)).expand(mask.shape)
