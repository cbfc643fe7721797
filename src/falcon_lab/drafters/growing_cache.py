"""A KV cache for a drafter, which need not be told how long its sequence will get.

Shapes: B batch, G key/value heads, C capacity, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.targets.kv_cache import KVCache
from falcon_lab.targets.kv_layout import KVLayout


class GrowingCache(KVCache):
    """A ``KVCache`` that can be given more room; its rows stay as they are.

    Args:
        layers: of the drafter.
        capacity: C to begin with.
        layout: the rows of every layer.
        most: rows up to which it doubles; beyond them it grows to what is needed and no further.
    """

    def __init__(self, layers: int, capacity: int, layout: KVLayout, most: int) -> None:
        super().__init__(layers, capacity, layout)
        self._most = most

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` rows, at least doubling the capacity while that is allowed.

        Returns:
            Whether the capacity changed.
        """
        if rows <= self.capacity:
            return False
        self.capacity = max(rows, min(2 * self.capacity, self._most))
        kept = [None if layer is None else self._valid(layer) for layer in self._rows]
        self._pools, self._shared, self._rows = [], {}, [None] * len(kept)
        for index, layer in enumerate(kept):
            if layer is not None:
                for new, old in zip(self._allocate(index, *layer), layer, strict=True):
                    new[:, :, : self.length] = old
        if self.positions is not None:
            with torch.inference_mode(False):
                more = self.capacity - self.positions.shape[1]
                self.positions = functional.pad(self.positions, (0, more))
        return True

    def _valid(self, layer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = layer
        return keys[:, :, : self.length], values[:, :, : self.length]
