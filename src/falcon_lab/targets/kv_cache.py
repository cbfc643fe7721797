"""A preallocated key/value cache behind the layered cache interface of Hugging Face.

Every layer keeps every row, sliding-window layers too: windows are written into the mask
(``backbone.py``), so that a tree can be verified and its accepted path kept in one way for all
families. Keys are rotated when they are written, at the position that they keep.

Shapes: L layers, B batch, G key/value heads, C capacity, n new rows, D head size, M kept rows.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from falcon_lab.errors import FalconLabError
from falcon_lab.targets.kv_layout import KVLayout


class KVCache(Cache):
    """Rows of keys and values that are written, kept and dropped in place.

    A forward pass appends its n rows at ``length``. ``commit`` keeps some of the rows after a
    point and ``truncate`` drops the newest. Memory is taken at the first update, when the shapes
    are known.

    Attributes:
        capacity: C, rows that fit.
        length: rows that are valid after the last forward pass.
        positions: ``[B or 1, C]`` long, position of each row; kept for sliding windows alone
            (None until ``record_positions``).

    Args:
        layers: L.
        capacity: C.
        layout: the rows of every layer; without it all are taken for like the first that comes,
            and one that is not gets memory of its own beside the share that it leaves unused.
    """

    def __init__(self, layers: int, capacity: int, layout: KVLayout | None = None) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self.positions: Tensor | None = None
        self._filled = [0] * layers
        self._rows: list[tuple[Tensor, Tensor] | None] = [None] * layers  # each [B, G, C, D]
        self._layout = layout
        self._flat: tuple[list[Tensor], list[Tensor]] | None = None  # _rows, for ``tensors``
        self._pools: list[Tensor] = []  # [..., C, D]: what commit moves rows in
        self._shared: dict[tuple[int, ...], list[Tensor]] = {}  # layers -> their two pools

    @property
    def layout(self) -> KVLayout:
        """The rows of every layer: as given, or as far as they are known by now."""
        if self._layout is not None:
            return self._layout
        return KVLayout.of(self._rows, positions=self.positions is not None)

    @property
    def sequences(self) -> int:
        """B, or 0 before the first update."""
        return self._pools[0].shape[-4] if self._pools else 0

    @property
    def nbytes(self) -> int:
        """Memory taken so far."""
        positions = 0 if self.positions is None else self.positions.nbytes
        return sum(pool.nbytes for pool in self._pools) + positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, G, n, D]`` rows to a layer; all its valid rows, ``[B, G, length + n, D]``.

        Raises:
            FalconLabError: when the rows do not fit.
        """
        start = self._filled[layer_idx]
        stop = start + key_states.shape[2]
        if stop > self.capacity:
            raise FalconLabError(
                f"the KV cache holds {self.capacity} positions and {stop} are needed; make it "
                "with the prompt, the new tokens and the largest tree in mind"
                if self.capacity
                else "this KV cache was handed over to another sequence; ask for a new one"
            )
        rows = self._rows[layer_idx]
        if rows is None:
            rows = self._allocate(layer_idx, key_states, value_states)
        keys, values = rows
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self._filled[layer_idx] = self.length = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of all layers, ``[B, G, C, D]`` each, for a pass that writes its rows
        itself and then calls ``advance``.

        Raises:
            FalconLabError: a layer keeps no rows of its own, or nothing was read yet.
        """
        if self._flat is None:
            pairs = [pair for pair in self._rows if pair is not None]
            if len(pairs) < len(self._rows):
                raise FalconLabError("not every layer has keys and values of its own")
            self._flat = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return self._flat

    def advance(self, new: int) -> None:
        """Count ``new`` rows that were written at ``length``."""
        self._set_length(self.length + new)

    def commit(self, start: int, path: Tensor, *, last: int | None = None) -> None:
        """Keep rows ``start + path[i]`` as rows ``start + i`` and drop the others after ``start``.

        Args:
            start: rows before it stay as they are.
            path: ``[M]`` long, increasing, as node indices along a path of a tree are.
            last: its last entry, where that is known without waiting for the device.
        """
        kept = path.shape[0]
        # An increasing path that ends at M - 1 is 0..M-1: those rows are in place. One look at
        # the last entry is cheaper than moving rows, on a GPU too.
        if kept and (int(path[-1]) if last is None else last) != kept - 1:
            source = path + start
            for pool in self._pools:
                pool[..., start : start + kept, :] = pool.index_select(-2, source.to(pool.device))
            if self.positions is not None:
                moved = self.positions.index_select(1, source.to(self.positions.device))
                self.positions[:, start : start + kept] = moved
        self._set_length(start + kept)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        if not 0 <= length <= self.length:
            raise FalconLabError(f"cannot keep {length} of the KV cache's {self.length} rows")
        self._set_length(length)

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note the positions ``[B or 1, n]`` of the rows that the coming forward pass appends.

        Returns:
            ``[B or 1, length + n]``, the positions of all rows.
        """
        stop = self.length + positions.shape[1]
        if self.positions is None:
            self.positions = _blank(positions, (positions.shape[0], max(self.capacity, stop)))
        self.positions[:, self.length : stop] = positions
        return self.positions[:, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Valid rows (Hugging Face's name for ``length``)."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys that a query of that length sees, and their offset."""
        return self.length + int(query_length), 0

    def hand_over(self) -> Self:
        """An empty cache with this one's memory; this one holds nothing from then on."""
        other = copy.copy(self)
        other.reset()
        self.capacity, self._rows, self._flat = 0, [None] * len(self._rows), None
        self._pools, self._shared, self.positions = [], {}, None
        self._set_length(0)
        return other

    def reset(self) -> None:
        """Forget all rows and keep the memory."""
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        self.length = length
        # Layers that keep no rows of their own (they read another layer's) stay empty.
        self._filled = [length if filled else 0 for filled in self._filled]

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rows for a layer: a slice of the pool of all layers whose rows are like its.

        One pool makes a commit two kernels instead of two per layer.
        """
        layout = self._layout
        alike = tuple(range(len(self._rows))) if layout is None else layout.alike(layer)
        if alike not in self._shared:
            self._shared[alike] = [self._pool(states, len(alike)) for states in (key, value)]
            self._pools += self._shared[alike]
        keys, values = (pool[alike.index(layer)] for pool in self._shared[alike])
        if not (_fits(keys, key) and _fits(values, value)):
            keys, values = self._own(key), self._own(value)
            self._pools += [keys, values]
        self._rows[layer] = keys, values
        self._flat = None
        return keys, values

    def _pool(self, like: Tensor, layers: int) -> Tensor:
        batch, heads, _, size = like.shape
        return _blank(like, (layers, batch, heads, self.capacity, size))

    def _own(self, like: Tensor) -> Tensor:
        batch, heads, _, size = like.shape
        return _blank(like, (batch, heads, self.capacity, size))


def _blank(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    # A plain tensor even under inference mode, so that the cache may be used outside it too.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=like.dtype, device=like.device)


def _fits(rows: Tensor, states: Tensor) -> bool:
    return (rows.shape[0], rows.shape[1], rows.shape[3], rows.dtype, rows.device) == (
        states.shape[0],
        states.shape[1],
        states.shape[3],
        states.dtype,
        states.device,
    )
