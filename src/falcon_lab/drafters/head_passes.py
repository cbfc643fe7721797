"""What a pass of a head's drafting reads and gives, and the passes through its modules as they are.

Shapes: D sequences (the root's one, or F branches), L rows of a sequence, O older rows before them,
R = O + D·L rows of a pass, N of them asked for predictions, W columns of a mask, C channels of a
joined row, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import Fusing, State
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import GrowingCache, KVCache


class NewRows(NamedTuple):
    """What a pass from tokens to logits reads, beside the cache of earlier rows.

    Attributes:
        tokens: ``[D, L]`` long.
        features: ``[D, L, H]``.
        state: of the fuse before each sequence, if it remembers any.
        older: ``[O, C]`` rows fused before, computed once more ahead of the others.
        positions: ``[R]`` long.
        mask: ``[R, W]`` bool, who sees whom among the last W keys; None: all see all.
        asked: N, the last rows of R.
    """

    tokens: Tensor
    features: Tensor
    state: State | None
    older: Tensor
    positions: Tensor
    mask: Tensor | None
    asked: int


class AtOnce(NamedTuple):
    """What a pass from tokens to logits gives.

    Attributes:
        hidden: ``[N, H]``.
        logits: ``[N, V]``.
        fused: ``[D, L, H]``, the rows as they went into the decoder blocks.
        state: of the fuse after each sequence's last row, if it remembers any.
    """

    hidden: Tensor
    logits: Tensor
    fused: Tensor
    state: State | None


class WholePass(Protocol):
    """A pass from tokens to logits: ``CompiledPass``, or the graphs of a GPU."""

    def takes(self, tokens: Tensor, older: int, start: int) -> bool:
        """Whether there is one for ``[D, L]`` tokens after so many older rows, the first of them
        going to row ``start`` of the cache."""
        ...

    def __call__(self, rows: NewRows, cache: KVCache) -> AtOnce:
        """Fuse rows, append them and older ones to the cache, and predict from the last of them."""
        ...


class Passes:
    """The modules as they are.

    Attributes:
        spare: cache rows that a pass needs beyond those of its sequence.
        at_once: what takes tokens to logits in one pass, if there is such a thing.
    """

    spare = 0
    at_once: WholePass | None = None

    def __init__(self, fuse: Fusing, backbone: Backbone) -> None:
        self._fuse = fuse
        self._backbone = backbone

    @property
    def held(self) -> int:
        """Bytes of the last cache, where the next one takes them over."""
        return 0

    def capacity(self, rows: int) -> int:
        """Rows of the cache that a sequence of so many gets."""
        return rows

    def new_cache(self, rows: int, most: int) -> GrowingCache:
        """An empty cache of that capacity.

        Args:
            rows: that are needed.
            most: rows up to which it doubles when more are needed.
        """
        layers = self._backbone.config.num_hidden_layers
        return GrowingCache(layers, rows, self._backbone.layout, most)

    def fuse(self, rows: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """``[D, L, C]`` joined rows, going on from a state -> ``[D, L, H]`` and the next state."""
        fused: tuple[Tensor, State | None] = self._fuse(rows, state)
        return fused

    def blocks(
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Append rows to the cache.

        Args:
            rows: ``[1, R, H]``, fused.
            positions: ``[1, R]`` long.
            mask: ``[1, R, W]`` bool, who sees whom among the last W keys; None: all see all.
            cache: earlier rows.

        Returns:
            ``[1, R, H]``.
        """
        hidden: Tensor = self._backbone(
            embeddings=rows, positions=positions, mask=mask, cache=cache
        )
        return hidden


def feature_dtype(drafter: HeadLayers) -> torch.dtype:
    """What holds the target's features as well as the head's own, which take their places."""
    own = next(drafter.backbone.parameters()).dtype
    return torch.promote_types(drafter.host.dtype, own)
