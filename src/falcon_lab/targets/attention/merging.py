"""Attention over parts of the keys, put together by the log-sum-exp of their scores.

The softmax over a union of keys is the average of the softmaxes over its parts, weighted by the
exponential of each part's log-sum-exp (Milakov and Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135, section 3.1). All arithmetic here is at least in float32.

Shapes: B batch, A heads, N rows, W keys, D head size, r query heads that share a key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


def merge(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both, which have none in common.

    The weight is the logistic function of a difference: no exponential overflows, however large
    the scores. A row must see a key in one of them.
    """
    dtype = at_least_float32(one.seen.dtype)
    weight = torch.sigmoid(one.lse - other.lse)[..., None].to(dtype)
    seen = torch.lerp(other.seen.to(dtype), one.seen.to(dtype), weight)
    return Partial(seen, torch.logaddexp(one.lse, other.lse))


def with_tree(
    prefix: Partial, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float
) -> Tensor:
    """Attention over a prefix that is done already and a few masked keys.

    The prefix is one more key: its score is its log-sum-exp and its value is what was seen there.
    One softmax is then the whole merge, and as safe as any.

    Args:
        prefix: of the same rows and heads.
        query: ``[B, A, rN, D]``, the N rows of r query heads one below the other.
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
    """The type that scores are kept in."""
    return torch.promote_types(dtype, torch.float32)
