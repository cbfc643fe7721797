"""The forward pass of a round: context that is new, and a block behind it.

Shapes: N new positions of context, C those before them, S = C + N + k + 1 keys, L tapped layers,
k block, G key/value heads, D head size, H hidden, V vocabulary (the
draft vocabulary, where there is one).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import DraftVocabulary, Outputs
from falcon_lab.model.attention.backend import widened
from falcon_lab.model.kv_layout import KVLayout, LayerKV
from falcon_lab.model.passes import Forward, Inputs, NewPositions, Shapes
from falcon_lab_dflash.layers import DraftModel


class BlockForward(Forward):
    """Give the draft layers new context, and draft a block: one append to the cache.

    The block is appended too, for the pass alone: truncate the cache to the context afterwards.

    Args:
        model: the draft layers.
        mask: ``[H]``, stands for a token that is to be drafted.
        host: the target, for its embeddings and its LM head.
        block: k.
        vocabulary: whose LM head is used in place of the target's; None: none.
        causal: a token of the block attends to those up to itself alone.
    """

    def __init__(
        self,
        model: DraftModel,
        mask: nn.Parameter,
        host: Any,
        block: int,
        vocabulary: DraftVocabulary | None = None,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__("drafter")
        self.model, self.mask, self.host, self.block = model, mask, host, block
        self.vocabulary, self.causal = vocabulary, causal

    @property
    def layout(self) -> KVLayout:
        """Return what a draft layer keeps of a position."""
        heads = self.model.shape.groups, self.model.shape.head
        return KVLayout((LayerKV(heads, heads, self.model.dtype),) * len(self.model.layers))

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Draft from taps ``[N, L, H]`` and a root (0-d long).

        Returns:
            Logits ``[k, V]`` and the features that they are made of, ``[k, H]``.
        """
        assert new is not None
        taps, root = inputs
        count = taps.shape[0]
        context = self.model.context(taps[None], new.positions[None, :count])
        embedded = self.host.embed(root)[None].to(self.model.dtype)
        hidden = torch.cat([embedded, self.mask.expand(self.block, -1)])[None]
        rotation = self.model.rotation(new.positions[None, count:])
        mask = self._mask(None if new.mask is None else new.mask[None, count:])
        for number, layer in enumerate(self.model.layers):
            normed = layer.normed(hidden)
            own = layer.keys_values(normed, rotation)
            both = (torch.cat((side[number], o), 2) for side, o in zip(context, own, strict=True))
            keys, values = new.cache.update(*both, number)
            whole = None if mask is None else widened(mask, keys.shape[2])
            hidden = layer(hidden, normed, rotation, keys, values, whole)
        features = self.model.norm(hidden)[0, 1:]
        words = self.vocabulary or self.host
        return words.head(features.to(self.host.dtype)), features

    def _mask(self, given: Tensor | None) -> Tensor | None:
        """Return what the block attends to, ``[1, k + 1, W]`` bool; None: everything."""
        if not self.causal:
            return given
        size = self.block + 1
        own = torch.ones(1, size, size, dtype=torch.bool, device=self.mask.device).tril()
        if given is None:
            return own
        before, within = given[..., :-size], given[..., -size:]
        return torch.cat([before, within & own], dim=-1)

    def traced(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Compute ``forward`` without a mask: nothing is padded."""
        assert new is not None
        return self.forward(inputs, new._replace(mask=None))

    def supports(self, inputs: Inputs) -> bool:
        """Return whether a round leaves so many positions, or one more to make them even."""
        return 0 < inputs[0].shape[0] <= self.block + 2

    def count(self, shapes: Shapes) -> int:
        """Return N + k + 1."""
        return shapes[0][0] + self.block + 1

    def label(self, shapes: Shapes) -> str:
        """Return the name with the block and N."""
        return f"drafter-{self.block}-after-{shapes[0][0]}"

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield rounds that leave up to ``most`` positions."""
        taps = self.model.fuse.in_features // self.model.shape.hidden
        for new in range(1, min(most, self.block + 1) + 1):
            shape = (new + repeated(new), taps, self.model.shape.hidden)
            yield [torch.zeros(shape, dtype=self.host.dtype), torch.zeros((), dtype=torch.long)]


def repeated(new: int) -> int:
    """Return how many older positions are read again with so many new ones.

    One, where that makes an even number: there are half as many passes to compile.
    """
    return new % 2 if new > 1 else 0
