"""Who sees whom: boolean attention masks, and the form that each attention kernel wants.

True means "sees" everywhere. Every row sees at least itself, so that no softmax is empty.

Shapes: B batch, T queries, S keys (P cached rows, then the T new ones).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.targets.attention.registration import PREFIX

ATTENTION = ("sdpa", "eager", "flex_attention")
"""Attention implementations that take an arbitrary mask."""


def causal_mask(new: int, start: int, device: torch.device) -> Tensor:
    """``new`` rows after ``start`` cached ones -> ``[1, new, start + new]``."""
    return torch.ones(1, new, start + new, dtype=torch.bool, device=device).tril(start)


def packed_mask(documents: Tensor) -> Tensor:
    """``[B, T]`` documents -> ``[B, T, T]``, causal within each document and blind outside it.

    Padding (-1) counts as one more document.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same & causal_mask(documents.shape[1], 0, documents.device)


def windowed(mask: Tensor, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """``mask`` [B or 1, T, S] without the keys that lie ``window`` positions back or more.

    Args:
        mask: who sees whom without the window.
        queries: ``[B or 1, T]`` positions.
        keys: ``[B or 1, S]`` positions; a tree's node has its root's position plus its depth.
        window: positions that a query sees, its own counted.
    """
    return mask & (keys[:, None, :] > (queries - window)[:, :, None])


def for_attention(mask: Tensor, implementation: str, dtype: torch.dtype) -> Any:
    """A bool mask [B or 1, T, S] in the form that an attention implementation takes.

    Eager attention *adds* its mask: a boolean one would be wrong without any error.

    Returns:
        ``[B or 1, 1, T, S]`` float (``eager``) or bool (``sdpa`` and our own backends, which also
        take one of the last keys alone), or a ``BlockMask``.

    Raises:
        FalconLabError: for an implementation that takes no mask of ours.
    """
    if implementation == "sdpa" or implementation.startswith(PREFIX):
        return mask[:, None]
    if implementation == "eager":
        blank = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return blank.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
    if implementation == "flex_attention":
        return _block_mask(mask)
    raise FalconLabError(
        f"attention {implementation!r} cannot take a tree mask; choose one of "
        f"{', '.join(ATTENTION)}"
    )


def _block_mask(mask: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, queries, keys = mask.shape

    def sees(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask[b, q, k]

    # B = 1 broadcasts over the batch, as the other kernels' masks do.
    return create_block_mask(sees, batch, None, queries, keys, device=str(mask.device))
