"""A block drafter like DFlash: one bidirectional pass over masked positions, on tapped features.

After positions 0..a of context the root x_{a+1} stands at position a + 1, and k masks behind it.
The mask j places after the root says x_{a+1+j}. Every draft layer's keys and values also come from
the target's hidden states at the context's positions, which are computed once and cached.

Shapes: B batch, T rows, A anchors, R = A·k prediction rows, M committed positions, C rows of
context, L tapped layers, k block, F frontier blocks, H hidden, V vocabulary (the
draft vocabulary, where there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.drafters.compiled_passes import CompilablePasses
from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.passes import EagerPass, ForwardPass, NewPositions, PassMaker
from falcon_lab_dflash import DFlashConfig
from falcon_lab_dflash.anchors import block_mask, draw_anchors
from falcon_lab_dflash.layers import DraftModel, Shape
from falcon_lab_dflash.passes import BlockForward, repeated

MOST_TAPS = 5
ROOM = 512  # positions of context where the length of the text is unknown


class DFlashDrafter(CompilablePasses, TrainableDrafter):
    """The drafter of ``DFlashConfig``; the target's embeddings and LM head are used as they are.

    Attributes:
        block: k.
        length: k, in a subclass whose passes predict less, too.
        needs: nothing beside the taps.
        taps: layers of the target that are read.
        max_passes: one; a block is all there is to a round.
    """

    needs: frozenset[str] = frozenset()
    max_passes = 1

    def __init__(self, config: DFlashConfig, context: BuildContext) -> None:
        super().__init__()
        self.block = self.length = config.block
        self.host: Any = context.host
        self.taps = tuple(config.taps) or spread(self.host.config.num_hidden_layers)
        shape = Shape.of(self.host.config, config)
        self.model = DraftModel(shape, config.layers, len(self.taps))
        self.mask = nn.Parameter(0.02 * torch.randn(self.host.hidden_size))
        self._anchors, self._causal = config.anchors, config.causal
        self.draft_vocabulary = context.draft_vocabulary(config.draft_vocabulary)
        self._room = ROOM
        self.draft_through(EagerPass)

    def _forget(self) -> None:
        self._cache: KVCache | None = None
        self._pending: list[Tensor] = []  # [M, L, H] each, not yet in the cache
        self._newest: Tensor | None = None  # [1, L, H], the last that is in the cache
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
        masks = self.mask.expand(*anchors.shape, self.length, -1)
        if reveal is not None:
            shown = self.host.embed(reveal.tokens).to(masks).unflatten(1, (count, self.length))
            masks = masks.where(~reveal.mask.view(*masks.shape[:3], 1), shown)
        first = inputs.positions.gather(1, anchors) + 1
        hidden = self._blocks(
            torch.cat([roots[:, :, None], masks], dim=2),
            first[:, :, None] + torch.arange(self.length + 1, device=device),
            self.model.context(inputs.taps, inputs.positions),
            block_mask(inputs.documents, anchors, self.length, causal=self._causal),
        )
        slot = torch.arange(self.length, device=device)
        label = anchors[:, :, None] + 1 + slot
        return Prediction(
            features=hidden[:, :, 1:].flatten(1, 2),
            logits=None,
            label=label.flatten(1),
            source=anchors.repeat_interleave(self.length, dim=1),
            slot=slot.repeat(count).expand_as(label.flatten(1)),
            group=torch.arange(count, device=device)
            .repeat_interleave(self.length)
            .expand_as(label.flatten(1)),
        )

    def _blocks(
        self, rows: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Compute all blocks of a batch in one pass, ``[B, A, k + 1, H]``.

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
        self._forget()

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Return the memory of the keys and values of a context, and of a block behind it."""
        return self._pass.cache_bytes(positions + self.length + 1)

    @property
    def kv_allocated(self) -> int:
        """Return the bytes that the next text reuses."""
        return self._pass.reserved_bytes

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first position comes, and no more later."""
        self._room = positions

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Store hidden states of new positions for the next draft, or read them now."""
        if observation.taps is None:
            raise ValueError("dflash reads hidden states of the target's layers: give it taps")
        self._root = observation.tokens[-1]
        self._pending.append(observation.taps)
        if observation.remaining:
            taps = torch.cat(self._pending)
            self._pending, self._newest = [], taps[-1:]
            cache = self._reserved(len(taps))
            sides = self.model.context(taps[None], self._positions(cache, len(taps))[None])
            for layer, pair in enumerate(zip(*sides, strict=True)):
                cache.update(*pair, layer)

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return ``[1, k, V]`` for the root, and no predictions for anything below."""
        words = self.draft_vocabulary
        if frontier.tokens.shape[1]:
            return DraftOutput.nothing(frontier, self.host.vocab_size, words)
        if self._root is None:
            raise RuntimeError("draft() needs an observed position: call observe() first")
        taps = self._context()
        cache = self._reserved(len(taps) + self.length + 1)
        positions = self._positions(cache, len(taps) + self.length + 1)
        logits, features = self._pass([taps, self._root], NewPositions(positions, None, cache))
        cache.truncate(cache.length - self.length - 1)  # the block was there for the pass alone
        return DraftOutput(logits[None], features[None], all_proposed=True, vocabulary=words)

    def _context(self) -> Tensor:
        """Return the taps ``[N, L, H]`` of the positions that the pass is to append."""
        new, newest, cache = self._pending, self._newest, self._cache
        self._pending = []
        if newest is None:
            taps = torch.cat(new)
        elif repeated(sum(len(part) for part in new)):
            assert cache is not None
            cache.truncate(cache.length - 1)
            taps = torch.cat([newest, *new])
        else:
            taps = torch.cat([newest[:0], *new])
        self._newest = taps[-1:] if len(taps) else newest
        return taps

    def _positions(self, cache: KVCache, new: int) -> Tensor:
        """Return ``[new]`` long, behind what is in the cache."""
        return torch.arange(cache.length, cache.length + new, device=self.mask.device)

    def _reserved(self, new: int) -> KVCache:
        """Return the text's cache with room for so many positions more."""
        if self._cache is None:
            room = max(self._room + self.length + 1, new)
            self._cache = self._pass.new_cache(room, self.host.max_positions)
        self._pass.reserve(self._cache, self._cache.length + new)
        return self._cache

    def draft_through(self, make: PassMaker) -> None:
        """Draft through passes that ``make`` makes, a round's new context and block in each."""
        forward = BlockForward(
            self.model,
            self.mask,
            self.host,
            self.length,
            self.draft_vocabulary,
            causal=self._causal,
        )
        self._pass = make(forward)
        self._forget()

    @property
    def passes(self) -> Sequence[ForwardPass]:
        """Return the one pass."""
        return (self._pass,)


def spread(layers: int) -> tuple[int, ...]:
    """Up to five of a target's layers, in equal steps from the first to the last but one."""
    last = max(1, layers - 1)
    count = min(MOST_TAPS, last)
    steps = max(1, count - 1)
    return tuple(dict.fromkeys(1 + (last - 1) * step // steps for step in range(count)))
