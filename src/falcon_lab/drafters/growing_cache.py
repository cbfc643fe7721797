"""A KV cache for a drafter, which is not told how long its sequence will get.

Shapes: B batch, G key/value heads, C capacity, D head size.
"""

from __future__ import annotations

from torch import Tensor

from falcon_lab.targets.kv_cache import KVCache


class GrowingCache(KVCache):
    """A ``KVCache`` that can be given more room; its rows stay as they are."""

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` rows, doubling the capacity as often as needed.

        Returns:
            Whether the capacity changed.
        """
        if rows <= self.capacity:
            return False
        while self.capacity < rows:
            self.capacity *= 2
        kept = [None if layer is None else self._valid(layer) for layer in self._rows]
        self._pools, self._rows = [], [None] * len(kept)
        for index, layer in enumerate(kept):
            if layer is not None:
                for new, old in zip(self._allocate(index, *layer), layer, strict=True):
                    new[:, :, : self.length] = old
        return True

    def _valid(self, layer: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = layer
        return keys[:, :, : self.length], values[:, :, : self.length]
