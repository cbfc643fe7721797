"""What of a packed batch is hidden in training, and what attends to what.

Shapes: B batch, T tokens, A anchors, K block, m masks that a block reads, Q = A·m.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-3
"""Least chance of a token to be hidden: its weight is one over it."""


class Anchors(NamedTuple):
    """Where blocks begin.

    Attributes:
        at: ``[B, A]`` long, the newest true token of each; ascending.
        real: ``[B, A]`` bool, whether there is such a block; the others fill up.
    """

    at: Tensor
    real: Tensor


def uniform(shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw numbers between 0 and 1, on the generator's device."""
    return torch.rand(shape, generator=generator, device=generator.device)


def with_next(documents: Tensor) -> Tensor:
    """Return ``[B, T]`` bool, which inputs are tokens of their document.

    The token of a pair stands one position ahead, so that of a document's last pair is another's.
    """
    inside = torch.zeros_like(documents, dtype=torch.bool)
    inside[:, :-1] = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    return inside


def document_mask(documents: Tensor) -> Tensor:
    """Return ``[B, T, T]`` bool: every token sees itself and all of its document."""
    same = documents[:, :, None] == documents[:, None]
    itself = torch.eye(documents.shape[1], dtype=torch.bool, device=documents.device)
    return (same & with_next(documents)[:, None]) | itself


def draw_anchors(documents: Tensor, count: int, generator: torch.Generator) -> Anchors:
    """Draw up to ``count`` anchors a sequence, any tokens of a document."""
    inside = with_next(documents)
    drawn = uniform(documents.shape, generator).to(documents.device) + inside
    at = drawn.topk(min(count, documents.shape[1]), dim=1).indices.sort(dim=1).values
    return Anchors(at, inside.gather(1, at))


def draw_cuts(documents: Tensor, generator: torch.Generator) -> Anchors:
    """Draw one anchor of every document."""
    inside = with_next(documents)
    drawn = uniform(documents.shape, generator).to(documents.device).masked_fill(~inside, -1.0)
    same = (documents[:, :, None] == documents[:, None]) & inside[:, None]  # [B, T, T]
    best = drawn[:, None].expand_as(same).masked_fill(~same, -1.0).amax(-1)
    chosen = inside & (drawn == best)
    count = max(1, int(chosen.sum(1).max()))
    at = chosen.float().topk(count, dim=1).indices.sort(dim=1).values
    return Anchors(at, chosen.gather(1, at))


class Noise(NamedTuple):
    """What is hidden.

    Attributes:
        hidden: bool, which tokens.
        weight: one over the chance of each, of the same shape.
    """

    hidden: Tensor
    weight: Tensor


def block_noise(shape: tuple[int, int, int], generator: torch.Generator) -> Noise:
    """Hide each token of a block with its chance t: ``[B, A, K]``."""
    chance = spread_chances(shape[0] * shape[1], generator).view(*shape[:2], 1)
    hidden = uniform(shape, generator) < chance
    return Noise(hidden, (1 / chance).expand(shape))


def document_noise(documents: Tensor, generator: torch.Generator) -> Noise:
    """Hide each token of a document with its chance t: ``[B, T]``."""
    most = int(documents.max()) + 1
    chances = spread_chances(documents.shape[0] * max(1, most), generator)
    of_all = chances.view(documents.shape[0], -1).to(documents.device)
    chance = of_all.gather(1, documents.clamp_min(0))
    hidden = uniform(documents.shape, generator).to(documents.device) < chance
    return Noise(hidden, 1 / chance)


def spread_chances(count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[n]`` chances between 0 and 1, evenly spread, as MDLM does to lower the variance."""
    steps = torch.arange(count, device=generator.device) / count
    chances = (uniform((1,), generator) + steps) % 1
    order = uniform((count,), generator).argsort()
    return SMALLEST + (1 - SMALLEST) * chances[order]


def own_block(at: Tensor, masks: int) -> Tensor:
    """Return ``[B, Q, Q]`` bool: the masks of a block see each other."""
    owner = torch.arange(at.shape[1], device=at.device).repeat_interleave(masks)
    return (owner[:, None] == owner).expand(at.shape[0], -1, -1)


def block_mask(clean: Tensor, documents: Tensor, at: Tensor, masks: int) -> Tensor:
    """Return the mask of tokens read causally with blocks behind some of them.

    Args:
        clean: ``[B, T, T]`` bool, of the tokens alone.
        documents: ``[B, T]`` long.
        at: ``[B, A]`` long.
        masks: m.

    Returns:
        ``[B, T + Q, T + Q]`` bool; no token sees a block, and a block sees the text up to its
        anchor, and itself.
    """
    seen = seen_text(documents, at, masks)
    nothing = clean.new_zeros(*clean.shape[:2], at.shape[1] * masks)
    behind = torch.cat((seen, own_block(at, masks)), 2)
    return torch.cat((torch.cat((clean, nothing), 2), behind), 1)


def full_mask(documents: Tensor, anchors: Anchors, masks: int) -> Tensor:
    """Return the mask of texts that are cut at one anchor each, where all see all.

    What lies behind the anchor sees itself alone, and is seen by nothing.
    """
    at, real = anchors
    column = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, :, None] == documents.gather(1, at)[:, None]  # [B, T, A]
    kept = same & real[:, None] & (column[:, None] <= at[:, None])
    text = (kept[:, :, None] & kept[:, None]).any(-1)
    text = text | torch.eye(len(column), dtype=torch.bool, device=text.device)
    to_masks = kept.repeat_interleave(masks, dim=2)
    behind = torch.cat((seen_text(documents, at, masks), own_block(at, masks)), 2)
    return torch.cat((torch.cat((text, to_masks), 2), behind), 1)


def seen_text(documents: Tensor, at: Tensor, masks: int) -> Tensor:
    """Return ``[B, Q, T]`` bool: what of the text the masks of every block see."""
    column = torch.arange(documents.shape[1], device=documents.device)
    own = documents.gather(1, at)
    seen = (documents[:, None] == own[:, :, None]) & (column <= at[:, :, None])
    return seen.repeat_interleave(masks, dim=1)


def last_of_document(documents: Tensor) -> Tensor:
    """Return ``[B, T]`` long, the last token of each one's document."""
    column = torch.arange(documents.shape[1], device=documents.device)
    same = documents[:, :, None] == documents[:, None]
    return (same * column).amax(-1)
