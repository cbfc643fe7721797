"""Place the blocks of a training pass, and make their attention mask.

Shapes: B batch, T tokens, A anchors, k block, Q = A·(k + 1) tokens of blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw_anchors(documents: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[B, A]`` long, the tokens at which blocks begin, ascending; A is at most T.

    They are drawn uniformly from the tokens that are not the last of their document; where these
    do not suffice, others are added, whose labels do not count.

    Args:
        documents: ``[B, T]`` long.
        count: A.
        generator: draws.
    """
    inside = torch.zeros_like(documents, dtype=torch.bool)
    inside[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    drawn = torch.rand(documents.shape, generator=generator, device=generator.device)
    drawn = drawn.to(documents.device) + inside
    return drawn.topk(min(count, documents.shape[1]), dim=1).indices.sort(dim=1).values


def block_mask(documents: Tensor, anchors: Tensor, block: int, *, causal: bool = False) -> Tensor:
    """Return the attention mask, ``[B, Q, T + Q]`` bool.

    A block attends to its document up to its anchor, and to all of itself; to no other block.

    Args:
        documents: ``[B, T]`` long.
        anchors: ``[B, A]`` long.
        block: k; with the root a block has k + 1 tokens.
        causal: a token attends to those of its block up to itself alone.
    """
    batch, tokens = documents.shape
    column = torch.arange(tokens, device=documents.device)
    own = documents.gather(1, anchors)
    context = (documents[:, None] == own[:, :, None]) & (column <= anchors[:, :, None])
    owner = torch.arange(anchors.shape[1], device=documents.device).repeat_interleave(block + 1)
    same = owner[:, None] == owner
    same = (same.tril() if causal else same).expand(batch, -1, -1)
    return torch.cat([context.repeat_interleave(block + 1, dim=1), same], dim=2)
