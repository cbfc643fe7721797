"""One drafting pass of a head, from tokens to logits: what it reads and gives, and how it is run.

Shapes: D sequences (the root's one, or F branches), L tokens of a sequence, O older tokens before
them, E queries or padding behind, T = O + D·L + E tokens of a pass, N of them asked for
predictions, W columns of a mask, C channels of a fused token, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.model.kv_cache import GrowingCache, KVCache


class NewRows(NamedTuple):
    """What a pass reads, beside the cache of earlier tokens.

    Attributes:
        tokens: ``[D, L]`` long.
        features: ``[D, L, H]``.
        state: of the fuse before each sequence, if it remembers any.
        older: ``[O, C]`` tokens fused before, computed once more ahead of the others.
        positions: ``[T]`` long.
        mask: ``[T, W]`` bool attention mask over the last W keys; None: all attend to all.
        asked: N, the last of T.
    """

    tokens: Tensor
    features: Tensor
    state: State | None
    older: Tensor
    positions: Tensor
    mask: Tensor | None
    asked: int


class PassOutput(NamedTuple):
    """What a pass gives.

    Attributes:
        hidden: ``[N, H]``.
        logits: ``[N, V]``.
        fused: ``[D, L, C]``, the tokens as they went into the decoder blocks.
        state: of the fuse after each sequence's last token, if it remembers any.
    """

    hidden: Tensor
    logits: Tensor
    fused: Tensor
    state: State | None


class FastPass(Protocol):
    """A pass that is compiled, or the graphs of a GPU."""

    def takes(self, rows: NewRows, cache: KVCache) -> bool:
        """Return whether it supports such a pass."""
        ...

    def __call__(self, rows: NewRows, cache: KVCache) -> PassOutput:
        """Run the pass."""
        ...


class Passes:
    """Run passes through the head's modules, or through ``fast`` where it supports them.

    Attributes:
        spare: cache positions that a pass needs beyond those of its sequence.
        fast: None where everything goes through the modules.
    """

    spare = 0
    fast: FastPass | None = None

    def __init__(self, head: HeadLayers) -> None:
        self._head = head

    @property
    def held(self) -> int:
        """Return the bytes of the last cache, where the next one takes them over."""
        return 0

    def capacity(self, rows: int) -> int:
        """Return the positions of the cache that a sequence of so many gets."""
        return rows

    def new_cache(self, rows: int, most: int) -> GrowingCache:
        """Make an empty cache of that capacity.

        Args:
            rows: positions that are needed.
            most: positions up to which it doubles when more are needed.
        """
        backbone = self._head.backbone
        return GrowingCache(backbone.config.num_hidden_layers, rows, backbone.layout, most)

    def __call__(self, rows: NewRows, cache: KVCache) -> PassOutput:
        """Fuse tokens, append them and older ones to the cache, and predict from the last."""
        if self.fast is not None and self.fast.takes(rows, cache):
            return self.fast(rows, cache)
        return run_modules(self._head, rows, cache)


def run_modules(head: HeadLayers, new: NewRows, cache: KVCache) -> PassOutput:
    """Run a pass through a head's modules."""
    fused, state = new.older[None, :0], new.state
    if new.tokens.shape[1]:
        fused, state = head.fuse(head.join(new.tokens, new.features), state)
    rows = fused.flatten(0, 1)
    if new.older.shape[0]:
        rows = torch.cat([new.older, rows])
    if head.offsets is not None:
        newest = fused[:, -1:] if fused.shape[1] else rows[None, -1:]
        rows = torch.cat([rows, (newest + head.offsets).flatten(0, 1)])
    elif (missing := new.asked - rows.shape[0]) > 0:  # at the beginning of a sequence
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    hidden = head.backbone(
        embeddings=rows[None],
        positions=new.positions[None],
        mask=None if new.mask is None else new.mask[None],
        cache=cache,
    )[0, -new.asked :]
    return PassOutput(hidden, head.logits(hidden), fused, state)


def feature_dtype(head: HeadLayers) -> torch.dtype:
    """Return what holds the target's features as well as the head's own, which take their place."""
    own = next(head.backbone.parameters()).dtype
    return torch.promote_types(head.host.dtype, own)
