"""A block drafter like DFlash: one bidirectional pass over masked positions, on tapped features.

After rows 0..a of context the root x_{a+1} stands at position a + 1, and k masks behind it. The
mask j places after the root says x_{a+1+j}. Every draft layer's keys and values also come from the
target's hidden states at the rows of context, which are computed once and cached.

Shapes: B batch, T rows, A anchors, R = A·k prediction rows, M committed positions, C rows of
context, L tapped layers, k block, F frontier blocks, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.protocols import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TreeBuilder,
)
from falcon_lab_dflash import DFlashConfig
from falcon_lab_dflash.anchors import block_mask, draw_anchors
from falcon_lab_dflash.cache import ContextCache
from falcon_lab_dflash.layers import DraftModel, Shape

MOST_TAPS = 5
ROOM = 512  # rows of context when nobody has said how long the text will get


class DFlashDrafter(nn.Module):
    """The drafter of ``DFlashConfig``; the target's embeddings and LM head are used as they are.

    Attributes:
        block: k.
        needs: nothing beside the taps.
        taps: layers of the target that are read.
        max_passes: one; a block is all there is to a round.
    """

    needs: frozenset[str] = frozenset()
    max_passes = 1

    def __init__(self, config: DFlashConfig, context: BuildContext) -> None:
        super().__init__()
        self.block = config.block
        self.host: Any = context.host
        self.taps = tuple(config.taps) or spread(self.host.config.num_hidden_layers)
        shape = Shape.like(self.host.config)
        self.model = DraftModel(shape, config.layers, len(self.taps))
        self.mask = nn.Parameter(0.02 * torch.randn(shape.hidden))
        self._anchors = config.anchors
        self._cache = ContextCache(ROOM, self.block + 1)
        self._root: Tensor | None = None  # 0-d

    # --- training ---------------------------------------------------------------------------

    def forward(self, inputs: DrafterInputs, reveal: Reveal | None = None) -> Prediction:
        """Predict blocks at random anchors. A row that is revealed shows its token, not the mask.

        The features of the prediction are what the target's LM head reads.
        """
        anchors = draw_anchors(inputs.documents, self._anchors, inputs.generator)
        return self.predict(inputs, anchors, reveal)

    def predict(
        self, inputs: DrafterInputs, anchors: Tensor, reveal: Reveal | None = None
    ) -> Prediction:
        """``forward`` at given ``anchors``, ``[B, A]`` long."""
        if inputs.taps is None:
            raise ValueError("dflash reads hidden states of the target's layers: give it taps")
        count, device = anchors.shape[1], anchors.device
        roots = self.host.embed(inputs.tokens.gather(1, anchors)).to(self.model.dtype)
        masks = self.mask.expand(*anchors.shape, self.block, -1)
        if reveal is not None:
            shown = self.host.embed(reveal.tokens).to(masks).unflatten(1, (count, self.block))
            masks = masks.where(~reveal.mask.view(*masks.shape[:3], 1), shown)
        first = inputs.positions.gather(1, anchors) + 1
        hidden = self._blocks(
            torch.cat([roots[:, :, None], masks], dim=2),
            first[:, :, None] + torch.arange(self.block + 1, device=device),
            self.model.context(inputs.taps, inputs.positions),
            block_mask(inputs.documents, anchors, self.block),
        )
        slot = torch.arange(self.block, device=device)
        label = anchors[:, :, None] + 1 + slot
        return Prediction(
            features=hidden[:, :, 1:].flatten(1, 2),
            logits=None,
            label=label.flatten(1),
            source=anchors.repeat_interleave(self.block, dim=1),
            slot=slot.repeat(count).expand_as(label.flatten(1)),
            group=torch.arange(count, device=device)
            .repeat_interleave(self.block)
            .expand_as(label.flatten(1)),
        )

    def _blocks(
        self, rows: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """All blocks of a batch at once, ``[B, A, k + 1, H]``.

        Args:
            rows: ``[B, A, k + 1, H]``.
            positions: ``[B, A, k + 1]`` long.
            context: keys and values of every layer.
            mask: ``[B, Q, T + Q]`` bool.
        """
        shape, hidden = rows.shape, rows.flatten(1, 2)
        rotation = self.model.rotation(positions.flatten(1))
        for layer, keys, values in zip(self.model.layers, *context, strict=True):
            normed = layer.normed(hidden)
            own = layer.keys_values(normed, rotation)
            both = [torch.cat(pair, dim=2) for pair in zip((keys, values), own, strict=True)]
            hidden = layer(hidden, normed, rotation, *both, mask)
        features: Tensor = self.model.norm(hidden)
        return features.view(shape)

    # --- drafting ---------------------------------------------------------------------------

    def reset(self, first: Tensor) -> None:
        """Start a text."""
        self._cache = ContextCache(ROOM, self.block + 1)
        self._root = None

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Memory of the context's keys and values, and of a block's."""
        shape, layers = self.model.shape, len(self.model.layers)
        row = 2 * layers * shape.groups * shape.head * self.mask.element_size()
        return (positions + self.block + 1) * row

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first row comes, and no more later."""
        self._cache = ContextCache(positions + self.block + 1, self.block + 1)

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Give the draft layers what the target made of new positions."""
        if observation.taps is None:
            raise ValueError("dflash reads hidden states of the target's layers: give it taps")
        new, start = len(observation.tokens), self._cache.length
        positions = torch.arange(start, start + new, device=observation.tokens.device)[None]
        self._cache.append(*self.model.context(observation.taps[None], positions))
        self._root = observation.tokens[-1]

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """``[1, k, V]`` for the root; no rows for anything below."""
        if frontier.tokens.shape[1]:
            blocks, device = frontier.tokens.shape[0], frontier.tokens.device
            return DraftOutput(torch.empty(blocks, 0, self.host.vocab_size, device=device))
        if self._root is None:
            raise RuntimeError("draft() needs an observed position: call observe() first")
        root = self.host.embed(self._root)[None].to(self.model.dtype)
        hidden = torch.cat([root, self.mask.expand(self.block, -1)])[None]
        start = self._cache.length
        positions = torch.arange(start, start + self.block + 1, device=hidden.device)[None]
        rotation = self.model.rotation(positions)
        for number, layer in enumerate(self.model.layers):
            normed = layer.normed(hidden)
            both = self._cache.with_block(number, *layer.keys_values(normed, rotation))
            hidden = layer(hidden, normed, rotation, *both, None)
        features = self.model.norm(hidden)[:, 1:]
        logits = self.host.head(features.to(self.host.dtype))
        return DraftOutput(logits, features, all_proposed=True)


def spread(layers: int) -> tuple[int, ...]:
    """Up to five of a target's layers, in equal steps from the first to the last but one."""
    last = max(1, layers - 1)
    count = min(MOST_TAPS, last)
    steps = max(1, count - 1)
    return tuple(dict.fromkeys(1 + (last - 1) * step // steps for step in range(count)))
