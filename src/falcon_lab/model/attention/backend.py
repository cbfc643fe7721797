"""What an attention backend and the kernel below it promise.

Shapes: B batch, A query heads, G key/value heads, N new rows, S keys (P earlier rows, then the N
new ones), W keys that a mask is about (the last ones), D head size.

PyTorch's ``scaled_dot_product_attention`` with the whole mask: what every backend can fall to.

Shapes: B batch, A query heads, G key/value heads, N new rows, S keys, W keys that a mask is about
(the last ones), D head size, r query heads that share a key head (A / G).

A backend under a name that Hugging Face's modules look their attention up by.

Hugging Face hands a ready-made 4-D mask to the attention function as it is, and keywords of a
model's call as well: a mask narrower than the keys says that all rows see what is older.

Shapes: as in ``backend.py``.
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
            -inf where no key is seen.
    """

    seen: Tensor
    lse: Tensor


class Backend(Protocol):
    """Attention of new rows over a cache, in which all rows see what is older than a mask."""

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
            mask: ``[B or 1, 1, N, W]`` bool, who sees whom among the last W keys; every row sees
                the S - W before them, and at least one of the W. None: every key.
            scale: of the scores.
            causal: the new rows see each other as a text's do, whatever ``mask`` says.

        Returns:
            ``[B, A, N, D]``.
        """
        ...


class Kernel(Protocol):
    """Attention without a mask that tells the log-sum-exp of its scores."""

    @property
    def name(self) -> str:
        """Return the name that ``target.attention`` takes."""
        ...

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Why it cannot run on such tensors here, or None."""
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
            causal: row i sees keys 0..i alone.
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
