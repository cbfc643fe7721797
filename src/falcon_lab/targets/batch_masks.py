"""Trees of several sequences side by side: padded to the widest, each behind its own context.

Shapes: B rows, N nodes of the widest tree, n nodes of a tree, W columns that a mask is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.targets.sending import send, to_device
from falcon_lab.trees.token_tree import TokenTree


@dataclass(frozen=True, slots=True)
class PaddedTrees:
    """B trees as one.

    Attributes:
        tokens: ``[B, N]`` long; 0 in the padding.
        depth: ``[B, N]`` long; 0 in the padding.
        ancestors: ``[B, N, N]`` bool; padding sees itself alone and is not seen.
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
        """N."""
        return self.tokens.shape[1]

    def real(self, rows: Tensor) -> Tensor:
        """``[B, N, …]`` -> ``[Σn, …]``: the rows of nodes, tree after tree."""
        flat = rows.flatten(0, 1)
        if min(self.counts) == self.width:
            return flat
        there = torch.arange(self.width) < torch.tensor(self.counts)[:, None]  # known to the host
        return flat.index_select(0, to_device(there.flatten().nonzero()[:, 0], rows.device))


def _ancestors(trees: Sequence[TokenTree], width: int) -> Tensor:
    if all(tree.nodes == width for tree in trees):
        return torch.stack([tree.ancestors for tree in trees])
    itself = torch.eye(width, dtype=torch.bool, device=trees[0].ancestors.device)
    ancestors = itself.repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        ancestors[row, : tree.nodes, : tree.nodes] = tree.ancestors
    return ancestors


def batch_tree_mask(ancestors: Tensor, starts: Sequence[int]) -> Tensor:
    """A node's path, and what its row has of the columns that not every row has.

    Args:
        ancestors: ``[B, N, N]`` bool.
        starts: columns of each row's context.

    Returns:
        ``[B, N, W]`` bool over the last W columns; every row sees all of those before.
    """
    if min(starts) == max(starts):
        return ancestors
    new, device = ancestors.shape[1], ancestors.device
    columns = torch.arange(min(starts), max(starts) + new, device=device)
    node = columns - send(starts, device)[:, None]  # [B, W]; below 0: the context
    within = node.clamp(0, new - 1)[:, None].expand(-1, new, -1)
    path = ancestors.gather(2, within) & (node < new)[:, None]
    return path | (node < 0)[:, None]


def batch_step_mask(starts: Sequence[int], device: torch.device) -> Tensor | None:
    """One new token in every row: ``[B, 1, W]`` bool as above, or None where all see all."""
    if min(starts) == max(starts):
        return None
    columns = torch.arange(min(starts), max(starts) + 1, device=device)
    return (columns <= send(starts, device)[:, None])[:, None]
