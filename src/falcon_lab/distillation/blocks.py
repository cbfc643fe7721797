"""Prediction rows by their blocks.

Shapes: B batch, R prediction rows, G blocks of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def number_blocks(group: Tensor) -> tuple[Tensor, Tensor]:
    """Number the blocks of a batch.

    Args:
        group: ``[B, R]`` long, equal within a block, unique in the sequence.

    Returns:
        ``[B, R]`` long, the number of each row's block in the batch, and ``[G]`` long, the
        sequence of each block; blocks are numbered sequence by sequence.
    """
    low = group.min()
    span = group.max() - low + 1
    sequence = torch.arange(group.shape[0], device=group.device).unsqueeze(1)
    keys, number = torch.unique(group - low + sequence * span, return_inverse=True)
    return number, keys.div(span, rounding_mode="floor")


def complete_blocks(valid: Tensor, number: Tensor, count: int, block: int) -> Tensor:
    """``[G]`` bool: the blocks whose k rows are all valid.

    Args:
        valid: ``[B, R]`` bool.
        number: ``[B, R]`` long, as ``number_blocks`` gives it.
        count: G.
        block: k.
    """
    sizes = torch.zeros(count, dtype=torch.long, device=valid.device)
    return sizes.index_add_(0, number.flatten(), valid.flatten().long()) == block
