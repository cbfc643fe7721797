"""What a KV cache keeps of every position, known before any of its memory is taken.

Families name the sizes of their heads in many ways, share layers, and keep keys and values of
different widths; what their layers hand to a cache is told by a pass over one token
(``Backbone.layout``).

Shapes: B batch, G key/value heads, C capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

POSITION_BYTES = torch.long.itemsize
"""Of a position that is kept for a sliding window."""


class LayerRows(NamedTuple):
    """A layer's rows of one position.

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
    """The rows of every layer.

    Attributes:
        layers: None for a layer that keeps no rows of its own (it reads another one's).
        positions: whether a row's position is kept beside it (for sliding windows).
    """

    layers: tuple[LayerRows | None, ...]
    positions: bool = False

    @classmethod
    def of(cls, rows: Sequence[tuple[Tensor, Tensor] | None], *, positions: bool) -> Self:
        """From what layers have handed over: ``[B, G, n, D]`` keys and values of each."""
        layers = (
            None if pair is None else LayerRows(_heads(pair[0]), _heads(pair[1]), pair[0].dtype)
            for pair in rows
        )
        return cls(tuple(layers), positions)

    @cached_property
    def per_position(self) -> int:
        """Bytes of one position of one sequence."""
        rows = sum(layer.bytes for layer in self.layers if layer is not None)
        return rows + (POSITION_BYTES if self.positions else 0)

    def bytes(self, capacity: int, batch: int = 1) -> int:
        """What a cache of ``batch`` sequences of ``capacity`` positions takes."""
        return self.per_position * capacity * batch

    def alike(self, layer: int) -> tuple[int, ...]:
        """The layers with the rows that this one has, itself among them."""
        return tuple(i for i, rows in enumerate(self.layers) if rows == self.layers[layer])


def _heads(states: Tensor) -> tuple[int, int]:
    return states.shape[1], states.shape[3]
