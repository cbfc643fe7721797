"""Merge attention over the context, without a mask, with attention over a tree, under one.

Every node of a tree attends to the whole text before it, so a kernel that supports no mask can read
the long part, and a mask is built for the new tokens alone. The softmax over a union of keys is the
average of the softmaxes over its parts, weighted by the exponential of each part's log-sum-exp
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135, section 3.1). All
arithmetic here is at least in float32.

Shapes: B batch, A query heads, G key/value heads, r = A / G query heads that share a key head, N
new tokens, S keys (P earlier tokens, then the N new ones), W keys that a mask covers (the last
ones), D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.model.attention.backend import Kernel, Partial, fold, masked_attention


def merge(one: Partial, other: Partial) -> Partial:
    """Merge attention over two sets of keys, which have none in common.

    The weight is the logistic function of a difference: no exponential overflows, however large
    the scores. A query must attend to a key in one of them.
    """
    dtype = at_least_float32(one.seen.dtype)
    weight = torch.sigmoid(one.lse - other.lse)[..., None].to(dtype)
    seen = torch.lerp(other.seen.to(dtype), one.seen.to(dtype), weight)
    return Partial(seen, torch.logaddexp(one.lse, other.lse))


def with_tree(
    prefix: Partial, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float
) -> Tensor:
    """Add attention over a few masked keys to that over a prefix.

    The prefix counts as one more key, whose score is its log-sum-exp and whose value is its output,
    so that one softmax is the whole merge, and no less stable than any.

    Args:
        prefix: of the same tokens and heads.
        query: ``[B, A, rN, D]``, the N tokens of r query heads one below the other.
        keys: ``[B, A, W, D]``.
        values: ``[B, A, W, D]``.
        mask: ``[B or 1, 1, N, W]`` bool.
        scale: of the scores.

    Returns:
        ``[B, A, rN, D]`` in the query's type.
    """
    dtype = at_least_float32(query.dtype)
    scores = (query.to(dtype) * scale) @ keys.to(dtype).mT
    allowed = mask[:, :, None]  # the same for the query heads of a group
    scores = scores.unflatten(2, (-1, mask.shape[2])).where(allowed, -torch.inf).flatten(2, 3)
    shares = torch.cat((scores, prefix.lse.to(dtype)[..., None]), -1).softmax(-1)
    of_tree = shares[..., :-1] @ values.to(dtype)
    return torch.addcmul(of_tree, shares[..., -1:], prefix.seen.to(dtype)).to(query.dtype)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the scores."""
    return torch.promote_types(dtype, torch.float32)


LARGEST_TREE = 512
"""Most nodes whose scores among each other are computed entry by entry."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A backend on top of a kernel; attention with the whole mask where that is the better way.

    Attributes:
        kernel: reads the prefix.
        least: earlier tokens from which merging pays.
    """

    kernel: Kernel
    least: int = 0

    def merges(self, new: int, earlier: int) -> bool:
        """Return whether ``new`` tokens after ``earlier`` are merged, not masked as a whole."""
        return earlier >= max(self.least, 1) and new <= LARGEST_TREE

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
        """Attend; arguments as in ``Backend``."""
        if mask is None or not mask.shape[-1]:  # PyTorch chooses its best kernel
            return masked_attention(query, keys, values, None, scale=scale)
        new, size = query.shape[2:]
        refused = self.kernel.refuses(query.device, query.dtype, size)
        if refused is None and values.shape[-1] == size:
            if causal:
                return self._text(query, keys, values, scale)
            if self.merges(new, keys.shape[2] - mask.shape[-1]):
                return self._tree(query, keys, values, mask, scale)
        return masked_attention(query, keys, values, mask, scale=scale)

    def _text(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Compute causal attention; the kernel has a mode for it where all keys are new."""
        new, earlier = query.shape[2], keys.shape[2] - query.shape[2]
        part = self.kernel(
            query, keys[:, :, earlier:], values[:, :, earlier:], scale=scale, causal=new > 1
        )
        if earlier:
            prefix = self.kernel(query, keys[:, :, :earlier], values[:, :, :earlier], scale=scale)
            part = merge(prefix, part)
        return part.seen.to(query.dtype)

    def _tree(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        folded = fold(query, keys.shape[1])
        earlier = keys.shape[2] - mask.shape[-1]
        prefix = self.kernel(folded, keys[:, :, :earlier], values[:, :, :earlier], scale=scale)
        new_keys, new_values = keys[:, :, earlier:], values[:, :, earlier:]
        seen = with_tree(prefix, folded, new_keys, new_values, mask, scale=scale)
        return seen.reshape(query.shape)
