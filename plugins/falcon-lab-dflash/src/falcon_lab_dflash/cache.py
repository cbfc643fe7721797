"""Keys and values of the committed positions, with room for one block behind them.

Shapes: M new rows, C rows of context, k block, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
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
        self._layers: tuple[list[Tensor], list[Tensor]] | None = None  # views of it

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

    def reserve(self, new: int) -> tuple[list[Tensor], list[Tensor]]:
        """Room for so many rows and the spare ones, behind those that are there.

        Returns:
            Keys and values of every layer, ``[1, G, capacity, D]`` each, to be written in place;
            the same tensors as long as the memory is.
        """
        assert self._pair is not None
        after = self._reserve(self.length + new + self._spare, *self._pair)
        if self._layers is None:
            keys, values = after
            self._layers = list(keys.unbind()), list(values.unbind())
        return self._layers

    @property
    def nbytes(self) -> int:
        """Memory taken so far."""
        return 0 if self._pair is None else sum(side.nbytes for side in self._pair)

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return 0 if self._pair is None else self._pair[0].shape[3]

    def clear(self, room: int | None = None) -> None:
        """Forget all rows and keep the memory, if it is enough for that many."""
        self.length = 0
        if room is not None:
            self._room = room
            if self.capacity < room:
                self._pair = self._layers = None

    def _reserve(self, rows: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        old = self._pair
        if old is None or old[0].shape[3] < rows:
            capacity = max(rows, self._room, 0 if old is None else 2 * old[0].shape[3])
            self._pair = self._longer(keys, capacity, 0), self._longer(values, capacity, 1)
            self._layers = None
        assert self._pair is not None
        return self._pair

    def _longer(self, like: Tensor, capacity: int, which: int) -> Tensor:
        shape = (*like.shape[:3], capacity, like.shape[4])
        with torch.inference_mode(False):  # so that it may be used outside it too
            new = like.new_zeros(shape)  # what a mask hides is a number at least
        if self._pair is not None:
            new[:, :, :, : self.length] = self._pair[which][:, :, :, : self.length]
        return new
