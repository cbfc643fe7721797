"""Keys and values of the committed positions, with room for one block behind them.

Shapes: M new rows, C rows of context, k block, G key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor


class ContextCache:
    """Grows as it must; what is there stays where it is otherwise.

    Attributes:
        length: C.

    Args:
        room: rows to make room for when the first ones come.
        spare: rows behind the context that are only written for a pass.
    """

    def __init__(self, room: int, spare: int) -> None:
        self.length = 0
        self._room, self._spare = room, spare
        self._pair: tuple[Tensor, Tensor] | None = None  # [layers, 1, G, capacity, D] each

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add ``[layers, 1, G, M, D]``."""
        stop = self.length + keys.shape[3]
        pair = self._reserve(stop + self._spare, keys, values)
        for kept, new in zip(pair, (keys, values), strict=True):
            kept[:, :, :, self.length : stop] = new
        self.length = stop

    def with_block(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's context and a block of ``[1, G, k + 1, D]`` behind it, until the next one."""
        assert self._pair is not None
        stop = self.length + keys.shape[2]
        for kept, new in zip(self._pair, (keys, values), strict=True):
            kept[layer, :, :, self.length : stop] = new
        return self._pair[0][layer, :, :, :stop], self._pair[1][layer, :, :, :stop]

    def _reserve(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = self._pair
        if old is None or old[0].shape[3] < rows:
            capacity = max(rows, self._room, 0 if old is None else 2 * old[0].shape[3])
            self._pair = self._longer(keys, capacity, 0), self._longer(values, capacity, 1)
        assert self._pair is not None
        return self._pair

    def _longer(self, like: Tensor, capacity: int, which: int) -> Tensor:
        shape = (*like.shape[:3], capacity, like.shape[4])
        new = like.new_empty(shape)
        if self._pair is not None:
            new[:, :, :, : self.length] = self._pair[which][:, :, :, : self.length]
        return new
