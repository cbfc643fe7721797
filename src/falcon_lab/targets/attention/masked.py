"""PyTorch's ``scaled_dot_product_attention`` with the whole mask: what every backend can fall to.

Shapes: B batch, A query heads, G key/value heads, N new rows, S keys, W keys that a mask is about
(the last ones), D head size, r query heads that share a key head (A / G).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def fold(query: Tensor, groups: int) -> Tensor:
    """``[B, A, N, D]`` -> ``[B, G, rN, D]``: the queries of a group one below the other.

    What needs no causal order can then be computed as if each query head had keys of its own, and
    no key is copied or read twice.
    """
    return query.reshape(query.shape[0], groups, -1, query.shape[-1])


def widened(mask: Tensor, seen: int) -> Tensor:
    """``[..., W]`` over the last W keys -> ``[..., seen]``; the earlier ones are seen by all."""
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
