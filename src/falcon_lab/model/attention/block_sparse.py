"""Attend to keys of which most are masked: a tile of queries reads those that it attends to.

The masks of a training pass are mostly empty. Behind the tokens of a sequence stand the queries or
the branches of all its blocks, and none attends to another's; a kernel that takes the mask as it is
computes all their scores nevertheless. On a CPU, where no kernel knows of blocks, each tile of
queries gathers its own keys. (On a GPU that is ``flex_attention``'s work; finding the keys there
would wait for the device.)

Shapes: as in ``backend.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.model.attention.backend import masked_attention

TILE = 64
"""Queries of a tile: fewer read fewer keys in vain, more are multiplied faster."""


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float, tile: int = TILE
) -> Tensor:
    """Attend with a mask of all keys; a key that no query of a tile attends to is not read.

    Args:
        query: ``[B, A, N, D]``.
        keys: ``[B, G, S, D]``, where G divides A.
        values: ``[B, G, S, D]``.
        mask: ``[B or 1, 1, N, S]`` bool; every query attends to one key at least.
        scale: of the scores.
        tile: queries that read their keys together.

    Returns:
        ``[B, A, N, D]``.
    """
    parts = []
    for some, rows in zip(query.split(tile, 2), mask.split(tile, 2), strict=True):
        read = rows.any(2).any(0)[0].nonzero()[:, 0]
        of_them = keys.index_select(2, read), values.index_select(2, read)
        parts.append(masked_attention(some, *of_them, rows.index_select(3, read), scale=scale))
    return torch.cat(parts, 2)


def is_worthwhile(query: Tensor, mask: Tensor) -> bool:
    """Return whether tiles read less: there are several, of a bool mask, on a CPU, not compiled."""
    several = mask.dtype == torch.bool and query.shape[2] > TILE
    return several and query.device.type == "cpu" and not torch.compiler.is_compiling()
