"""What attention backends compute, and the kernels below them.

A ``Backend`` attends over a KV cache with a mask of the last keys alone; a ``Kernel`` attends
without a mask and returns the log-sum-exp of its scores, so that ``merged.py`` can combine two of
them. ``masked_attention`` is PyTorch's ``scaled_dot_product_attention`` with the whole mask, which
every backend can fall back to.

Shapes: B batch, A query heads, G key/value heads, r = A / G query heads that share a key head, N
new tokens, S keys (P earlier tokens, then the N new ones), W keys that a mask covers (the last
ones), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over some of the keys.

    Attributes:
        seen: ``[B, A, N, D]``.
        lse: ``[B, A, N]``, natural logarithm of the sum of the exponentials of the scaled scores;
            -inf without keys.
    """

    seen: Tensor
    lse: Tensor


class Backend(Protocol):
    """Attention of new tokens over a KV cache; all of them attend to the keys before a mask."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        causal: bool = False,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[B, A, N, D]``.
            keys: ``[B, G, S, D]``, where G divides A.
            values: ``[B, G, S, D]``.
            mask: ``[B or 1, 1, N, W]`` bool, the attention mask of the last W keys; every token
                attends to the S - W before them, and to at least one of the W. None: to every key.
            scale: of the scores.
            causal: new tokens attend to each other causally, whatever ``mask`` is.

        Returns:
            ``[B, A, N, D]``.
        """
        ...


class Kernel(Protocol):
    """Attention without a mask that returns the log-sum-exp of its scores."""

    @property
    def name(self) -> str:
        """Return its name, as a value of ``target.attention``."""
        ...

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Return why it cannot run on such tensors here, or None."""
        ...

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        """Attend.

        Args:
            query: ``[B, A, N, D]``.
            keys: ``[B, G, S, D]`` with at least one key; S is N where ``causal``.
            values: ``[B, G, S, D]``.
            scale: of the scores.
            causal: token i attends to keys 0..i alone.
        """
        ...


def fold(query: Tensor, groups: int) -> Tensor:
    """Stack the queries of a group: ``[B, A, N, D]`` becomes ``[B, G, rN, D]``.

    What needs no causal order can then be computed as if each query head had keys of its own, and
    no key is copied or read twice.
    """
    return query.reshape(query.shape[0], groups, -1, query.shape[-1])


def widened(mask: Tensor, seen: int) -> Tensor:
    """Widen a mask ``[..., W]`` of the last W keys to ``[..., seen]``: all attend to the others."""
    earlier = seen - mask.shape[-1]
    return F.pad(mask, (earlier, 0), value=True) if earlier else mask


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, scale: float
) -> Tensor:
    """Attend over all keys at once; arguments as in ``Backend``, of which this is one."""
    if mask is not None:
        mask = widened(mask, keys.shape[2]).repeat(1, 1, query.shape[1] // keys.shape[1], 1)
    folded = fold(query, keys.shape[1])
    seen = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return seen.reshape(*query.shape[:3], -1)
