"""Boolean attention masks, and the form that each attention kernel wants.

True means that a query attends to a key. Every query attends at least to itself, so that no
softmax is empty.

Shapes: B sequences, T queries, S keys (cached positions, then the T new ones), N nodes of the
widest tree, n nodes of a tree, W keys that a mask is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.errors import FalconLabError
from falcon_lab.model.attention.registration import OURS
from falcon_lab.tree import TokenTree


def send(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Make a long tensor ``[n, …]`` of (nested) integers.

    The host does not wait for a GPU to finish what it is doing, as it does for ``torch.tensor``.
    """
    made = torch.tensor(numbers, dtype=torch.long)
    return made if device.type == "cpu" else to_device(made, device)


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """Send a tensor of the host, without waiting where that is possible."""
    if device.type == "cuda":
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


ATTENTION = ("sdpa", "eager", "flex_attention")
"""Attention implementations that take an arbitrary mask."""


def causal_mask(new: int, start: int, device: torch.device) -> Tensor:
    """Return the mask of ``new`` tokens after ``start`` cached ones, ``[1, new, start + new]``."""
    return torch.ones(1, new, start + new, dtype=torch.bool, device=device).tril(start)


def packed_mask(documents: Tensor) -> Tensor:
    """Return ``[B, T, T]`` of ``[B, T]`` documents, causal within each and blind outside it.

    Padding (-1) counts as one more document.
    """
    same = documents[:, :, None] == documents[:, None, :]
    return same & causal_mask(documents.shape[1], 0, documents.device)


def earlier_of_the_same(node: Tensor) -> Tensor:
    """Return which positions behind a node each one attends to: those before it of its own node.

    Args:
        node: ``[..., P]`` long, of each position behind one, in their order.

    Returns:
        ``[..., P, P]`` bool, itself among them.
    """
    same = node[..., :, None] == node[..., None, :]
    return same & torch.ones_like(same).tril()


def with_positions_behind(real: Tensor, source: Tensor, block: int) -> Tensor:
    """Return the mask of true positions with further ones behind some of them.

    Args:
        real: ``[B, T, T]`` bool, of the true positions.
        source: ``[B, S]`` long, those that have others behind them.
        block: k of each.

    Returns:
        ``[B, T + S·k, T + S·k]`` bool; no true position attends to another.
    """
    batch, tokens = real.shape[:2]
    behind = source.repeat_interleave(block, 1)  # [B, S·k]
    seen = real.gather(1, behind[..., None].expand(-1, -1, tokens))
    added = torch.cat((seen, earlier_of_the_same(behind)), 2)
    nothing = real.new_zeros(batch, tokens, behind.shape[1])
    return torch.cat((torch.cat((real, nothing), 2), added), 1)


def windowed(mask: Tensor, queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Return ``mask`` [B or 1, T, S] without the keys that lie ``window`` positions back or more.

    Args:
        mask: attention mask without the window.
        queries: ``[B or 1, T]`` positions.
        keys: ``[B or 1, S]`` positions; a tree's node has its root's position plus its depth.
        window: positions that a query attends to, its own counted.
    """
    return mask & (keys[:, None, :] > (queries - window)[:, :, None])


def for_attention(mask: Tensor, implementation: str, dtype: torch.dtype) -> Any:
    """Return a bool mask [B or 1, T, S] in the form that an attention implementation expects.

    Eager attention *adds* its mask: a boolean one would be wrong without any error.

    Returns:
        ``[B or 1, 1, T, S]`` float (``eager``) or bool (``sdpa`` and our own backends, which also
        take one of the last keys alone), or a ``BlockMask``.

    Raises:
        FalconLabError: for an implementation that supports no mask of ours.
    """
    if implementation == "sdpa" or implementation.startswith(OURS):
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


@dataclass(frozen=True, slots=True)
class PaddedTrees:
    """B trees side by side, padded to the widest.

    Attributes:
        tokens: ``[B, N]`` long; 0 in the padding.
        depth: ``[B, N]`` long; 0 in the padding.
        ancestors: ``[B, N, N]`` bool; padding attends to itself alone.
        counts: n of every tree.
    """

    tokens: Tensor
    depth: Tensor
    ancestors: Tensor
    counts: list[int]

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> PaddedTrees:
        """Put the trees side by side."""
        counts = [tree.nodes for tree in trees]
        return cls(
            pad_sequence([tree.tokens for tree in trees], batch_first=True),
            pad_sequence([tree.depth for tree in trees], batch_first=True),
            _ancestors(trees, max(counts)),
            counts,
        )

    @property
    def width(self) -> int:
        """Return N, the new tokens."""
        return self.tokens.shape[1]

    def real(self, padded: Tensor) -> Tensor:
        """Leave the padding out: ``[B, N, …]`` -> ``[Σn, …]``, tree after tree."""
        flat = padded.flatten(0, 1)
        if min(self.counts) == self.width:
            return flat
        there = torch.arange(self.width) < torch.tensor(self.counts)[:, None]  # known to the host
        return flat.index_select(0, to_device(there.flatten().nonzero()[:, 0], padded.device))


def _ancestors(trees: Sequence[TokenTree], width: int) -> Tensor:
    if all(tree.nodes == width for tree in trees):
        return torch.stack([tree.ancestors for tree in trees])
    itself = torch.eye(width, dtype=torch.bool, device=trees[0].ancestors.device)
    ancestors = itself.repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        ancestors[row, : tree.nodes, : tree.nodes] = tree.ancestors
    return ancestors


def batch_tree_mask(ancestors: Tensor, starts: Sequence[int]) -> Tensor:
    """Return every node's path, and its context where not every sequence has so much.

    Args:
        ancestors: ``[B, N, N]`` bool.
        starts: length of each sequence's context.

    Returns:
        ``[B, N, W]`` bool over the last W keys; all nodes attend to those before.
    """
    if min(starts) == max(starts):
        return ancestors
    new, device = ancestors.shape[1], ancestors.device
    columns = torch.arange(min(starts), max(starts) + new, device=device)
    node = columns - send(starts, device)[:, None]  # [B, W]; below 0: the context
    within = node.clamp(0, new - 1)[:, None].expand(-1, new, -1)
    path = ancestors.gather(2, within) & (node < new)[:, None]
    return path | (node < 0)[:, None]


def provisional_mask(
    masks: Sequence[Tensor | None],
    lengths: Sequence[int],
    before: Sequence[int],
    given: Sequence[Tensor],
) -> Tensor:
    """Return what new draft tokens of R sequences attend to, all of their committed text included.

    Args:
        masks: ``[n, P + n]`` bool of each sequence, over its provisional tokens; None: all.
        lengths: committed positions of each.
        before: P of each, the provisional tokens that are in the cache already.
        given: what is read of each, ``[n, ...]``.

    Returns:
        ``[R, N, S]`` bool over all keys of the longest sequence; padding attends to the text.
    """
    most = max(part.shape[0] for part in given)
    stop = max(map(sum, zip(lengths, before, strict=True))) + most
    whole = torch.zeros(len(given), most, stop, dtype=torch.bool, device=given[0].device)
    for row, (mask, length, earlier) in enumerate(zip(masks, lengths, before, strict=True)):
        whole[row, :, :length] = True
        new = given[row].shape[0]
        if mask is None:
            whole[row, :new, length : length + earlier + new] = True
        else:
            whole[row, :new, length : length + earlier + new] = mask
    return whole


def batch_step_mask(starts: Sequence[int], device: torch.device) -> Tensor | None:
    """Return the same of one new token each, ``[B, 1, W]``; None where all attend to all."""
    if min(starts) == max(starts):
        return None
    columns = torch.arange(min(starts), max(starts) + 1, device=device)
    return (columns <= send(starts, device)[:, None])[:, None]
