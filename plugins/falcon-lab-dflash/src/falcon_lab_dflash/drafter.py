"""A block drafter like DFlash: one bidirectional pass over masked positions, on tapped features.

After rows 0..a of context the root x_{a+1} stands at position a + 1, and k masks behind it. The
mask j places after the root says x_{a+1+j}. Every draft layer's keys and values also come from the
target's hidden states at the rows of context, which are computed once and cached.

Shapes: B batch, T rows, A anchors, R = A·k prediction rows, M committed positions, C rows of
context, L tapped layers, k block, F frontier blocks, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import (
    Announce,
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    PassCompiler,
    Prediction,
    Recorder,
    Reveal,
    TrainableDrafter,
    TreeBuilder,
)
from falcon_lab.model.compiled import compile_ahead
from falcon_lab.model.recording import recorder_for
from falcon_lab_dflash import DFlashConfig
from falcon_lab_dflash.anchors import block_mask, draw_anchors
from falcon_lab_dflash.cache import ContextCache
from falcon_lab_dflash.layers import DraftModel, Shape
from falcon_lab_dflash.passes import CompiledRounds, ReplayedRounds, Rounds

MOST_TAPS = 5
Behind = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
ROOM = 512  # rows of context when nobody has said how long the text will get


class DFlashDrafter(TrainableDrafter):
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
        self._fast: Rounds | None = None
        self._cache = self._new_cache(ROOM)
        self._pending: list[Tensor] = []  # [M, L, H] each, not yet in the cache
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
        self._pending.clear()
        self._root = None
        if isinstance(self._fast, ReplayedRounds):
            self._cache.clear()
        else:
            self._cache = self._new_cache(ROOM)

    def kv_bytes(self, positions: int, tree: TreeBuilder) -> int:
        """Memory of the context's keys and values, and of a block's."""
        shape, layers = self.model.shape, len(self.model.layers)
        row = 2 * layers * shape.groups * shape.head * self.mask.element_size()
        return max((positions + self._spare) * row, self.kv_allocated)

    @property
    def kv_allocated(self) -> int:
        """Memory that the next text takes over."""
        return self._cache.nbytes if isinstance(self._fast, ReplayedRounds) else 0

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Take that memory when the first row comes, and no more later."""
        room = positions + self._spare
        if isinstance(self._fast, ReplayedRounds):
            if self._cache.capacity < room:
                self._fast.forget()  # gone before more is taken
            self._cache.clear(room)
        else:
            self._cache = self._new_cache(room)

    @property
    def _spare(self) -> int:
        """Rows behind the context that are only written for a pass."""
        return self.block + 1 if self._fast is None else self._fast.spare

    def _new_cache(self, room: int) -> ContextCache:
        return ContextCache(room, self._spare)

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        """Give the draft layers what the target made of new positions.

        A compiled pass does that together with the next draft.
        """
        if observation.taps is None:
            raise ValueError("dflash reads hidden states of the target's layers: give it taps")
        self._root = observation.tokens[-1]
        self._pending.append(observation.taps)
        new = sum(len(taps) for taps in self._pending)
        if observation.remaining or self._fast is None or not self._fast.takes(new, self._cache):
            self._read()

    def _read(self) -> None:
        """Compute the context that is pending."""
        taps = torch.cat(self._pending)
        self._pending.clear()
        start = self._cache.length
        positions = torch.arange(start, start + len(taps), device=taps.device)[None]
        self._cache.append(*self.model.context(taps[None], positions))

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """``[1, k, V]`` for the root; no rows for anything below."""
        if frontier.tokens.shape[1]:
            blocks, device = frontier.tokens.shape[0], frontier.tokens.device
            return DraftOutput(torch.empty(blocks, 0, self.host.vocab_size, device=device))
        if self._root is None:
            raise RuntimeError("draft() needs an observed position: call observe() first")
        if self._fast is not None and self._pending:
            taps = torch.cat(self._pending)
            self._pending.clear()
            logits, features = self._fast(taps, self._root, self._cache)
        else:
            if self._pending:
                self._read()
            start = self._cache.length
            positions = torch.arange(start, start + self.block + 1, device=self._root.device)
            logits, features = self.guess(self._root, positions, self._cache.with_block, None)
        return DraftOutput(logits[None], features[None], all_proposed=True)

    def guess(
        self, root: Tensor, positions: Tensor, behind: Behind, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The block behind a context.

        Args:
            root: 0-d long.
            positions: ``[k + 1]`` long.
            behind: takes a layer's number, and keys and values of the block; gives those of
                context and block.
            mask: ``[1, k + 1, S]`` bool; None: all see all.

        Returns:
            Logits ``[k, V]`` and what they are made of, ``[k, H]``.
        """
        embedded = self.host.embed(root)[None].to(self.model.dtype)
        hidden = torch.cat([embedded, self.mask.expand(self.block, -1)])[None]
        rotation = self.model.rotation(positions[None])
        for number, layer in enumerate(self.model.layers):
            normed = layer.normed(hidden)
            both = behind(number, *layer.keys_values(normed, rotation))
            hidden = layer(hidden, normed, rotation, *both, mask)
        features = self.model.norm(hidden)[0, 1:]
        return self.host.head(features.to(self.host.dtype)), features

    # --- compiled passes ----------------------------------------------------------------------

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler | None = None,
        recorder: Recorder | None = None,
    ) -> Self:
        """As ``Drafter.compiled``: what a round adds to the context and its block are one pass."""
        other = copy.copy(self)
        recorder = recorder or recorder_for(self.mask.device)
        if recorder is None:
            other._fast = CompiledRounds(self, announce, compiler or compile_ahead)
        else:
            other._fast = ReplayedRounds(self, announce, recorder)
        other._cache, other._pending = other._new_cache(ROOM), []
        return other

    @property
    def is_compiled(self) -> bool:
        """Whether the passes of a round are compiled."""
        return self._fast is not None

    def prepare(self, longest: int) -> None:
        """As ``Drafter.prepare``."""
        if isinstance(self._fast, CompiledRounds):
            self._fast.prepare(longest)


def spread(layers: int) -> tuple[int, ...]:
    """Up to five of a target's layers, in equal steps from the first to the last but one."""
    last = max(1, layers - 1)
    count = min(MOST_TAPS, last)
    steps = max(1, count - 1)
    return tuple(dict.fromkeys(1 + (last - 1) * step // steps for step in range(count)))
