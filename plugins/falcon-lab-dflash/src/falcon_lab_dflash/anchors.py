"""Where the blocks of a training pass stand, and what they see.

Shapes: B batch, T rows, A anchors, k block, Q = A·(k + 1) rows of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_anchors(documents: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """``[B, A]`` long: rows at which blocks begin, ascending; A is at most T.

    They are drawn from the rows whose document goes on, each of them equally often; where these do
    not suffice others fill up, whose labels do not count.

    Args:
        documents: ``[B, T]`` long.
        count: A.
        generator: draws.
    """
    goes_on = torch.zeros_like(documents, dtype=torch.bool)
    goes_on[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    drawn = torch.rand(documents.shape, generator=generator, device=generator.device)
    drawn = drawn.to(documents.device) + goes_on
    return drawn.topk(min(count, documents.shape[1]), dim=1).indices.sort(dim=1).values


def block_mask(documents: Tensor, anchors: Tensor, block: int) -> Tensor:
    """``[B, Q, T + Q]`` bool: who sees whom.

    A block sees its document's rows up to its anchor, and all of itself; no other block.

    Args:
        documents: ``[B, T]`` long.
        anchors: ``[B, A]`` long.
        block: k; with the root a block has k + 1 rows.
    """
    batch, rows = documents.shape
    column = torch.arange(rows, device=documents.device)
    own = documents.gather(1, anchors)
    context = (documents[:, None] == own[:, :, None]) & (column <= anchors[:, :, None])
    owner = torch.arange(anchors.shape[1], device=documents.device).repeat_interleave(block + 1)
    same = (owner[:, None] == owner).expand(batch, -1, -1)
    return torch.cat([context.repeat_interleave(block + 1, dim=1), same], dim=2)
