"""Attention with linear biases (ALiBi, arXiv 2108.12409) in a tree.

The bias of a key grows with its position in the text. Bloom's own code takes a key's place in the
cache for it, which in a tree is another one; here the bias is part of the mask, by positions.

Shapes: B batch, A heads, T new tokens, S keys.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import BloomModel


class MaskedBloom(BloomModel):
    """A Bloom whose masks hold the bias."""

    def build_alibi_tensor(
        self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype
    ) -> Tensor:
        """Return no bias beside a mask ``[B or 1, A, T, S]``."""
        batch, keys = attention_mask.shape[0], attention_mask.shape[-1]
        return attention_mask.new_zeros(batch * num_heads, 1, keys, dtype=dtype)


def with_bias_in_masks(base: Any) -> tuple[Any, Tensor | None]:
    """Return a base model and, where its attention has linear biases, their slopes ``[A]``.

    Such a model is returned as one of the same weights that reads the bias from its masks; the one
    that was given stays as it is.
    """
    if not isinstance(base, BloomModel):
        return base, None
    two = torch.ones(1, 2, device="cpu")
    slopes = BloomModel.build_alibi_tensor(base, two, base.num_heads, torch.float32)[:, 0, 1]
    if not isinstance(base, MaskedBloom):
        base = copy.copy(base)
        base.__class__ = MaskedBloom
    return base, slopes


def biased(mask: Tensor, slopes: Tensor, keys: Tensor) -> Tensor:
    """Return a mask ``[B or 1, 1, T, S]`` that is added, with the bias of keys at ``[B or 1, S]``.

    Returns:
        ``[B or 1, A, T, S]``.
    """
    slopes = slopes.to(mask.device)
    return mask + (slopes[:, None, None] * keys[:, None, None]).to(mask.dtype)
