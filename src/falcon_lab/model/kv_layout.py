"""What a KV cache stores of every position, known before any of its memory is allocated.

Families name the sizes of their heads in many ways, share layers, and store keys and values of
different widths; a pass over one token shows what their layers hand to a cache
(``Backbone.layout``).

Shapes: B batch, G key/value heads, n new tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

POSITION_BYTES = torch.long.itemsize
"""Bytes of a position that is kept for a sliding window."""


class LayerKV(NamedTuple):
    """What a layer stores of one position.

    Attributes:
        key, value: heads and their size, (G, D).
        dtype: of both.
    """

    key: tuple[int, int]
    value: tuple[int, int]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """2 · G · D · element size, where keys and values are alike."""
        return sum(heads * size for heads, size in (self.key, self.value)) * self.dtype.itemsize


@dataclass(frozen=True)
class KVLayout:
    """What every layer stores of a position.

    Attributes:
        layers: None for a layer that stores nothing of its own (it reads another one's).
        positions: whether the position itself is kept too (for sliding windows).
    """

    layers: tuple[LayerKV | None, ...]
    positions: bool = False

    @classmethod
    def of(cls, states: Sequence[tuple[Tensor, Tensor] | None], *, positions: bool) -> Self:
        """Derive it from ``[B, G, n, D]`` keys and values of each layer."""
        layers = (
            None if pair is None else LayerKV(_heads(pair[0]), _heads(pair[1]), pair[0].dtype)
            for pair in states
        )
        return cls(tuple(layers), positions)

    @cached_property
    def per_position(self) -> int:
        """Return the bytes of one position of one sequence."""
        states = sum(layer.bytes for layer in self.layers if layer is not None)
        return states + (POSITION_BYTES if self.positions else 0)

    def bytes(self, capacity: int, batch: int = 1) -> int:
        """Return the bytes of a cache of ``batch`` sequences of ``capacity`` positions."""
        return self.per_position * capacity * batch

    def alike(self, layer: int) -> tuple[int, ...]:
        """Return the layers that store the same as this one, itself among them."""
        return tuple(i for i, kept in enumerate(self.layers) if kept == self.layers[layer])


def _heads(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]
