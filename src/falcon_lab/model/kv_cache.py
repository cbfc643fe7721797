"""What a KV cache keeps of every position, known before any of its memory is taken.

Families name the sizes of their heads in many ways, share layers, and keep keys and values of
different widths; what their layers hand to a cache is told by a pass over one token
(``Backbone.layout``).

Shapes: B batch, G key/value heads, C capacity, D head size.

A preallocated key/value cache behind the layered cache interface of Hugging Face.

Every layer keeps every row, sliding-window layers too: windows are written into the mask
(``backbone.py``), so that a tree can be verified and its accepted path kept in one way for all
families. Keys are rotated when they are written, at the position that they keep.

Shapes: L layers, B batch, G key/value heads, C capacity, n new rows, D head size, M kept rows.

A KV cache of several sequences, each of its own length, and the one-sequence view of a row.

Shapes: L layers, B rows, R rows of a pass, G key/value heads, C capacity, n new columns,
S columns seen, D head size.

A KV cache for a drafter, which need not be told how long its sequence will get.

Shapes: B batch, G key/value heads, C capacity, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from falcon_lab.errors import FalconLabError
from falcon_lab.model.masks import send

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

    def commit(
        self,
        starts: Sequence[int],
        paths: Sequence[Sequence[int]],
        nodes: Sequence[Tensor] = (),
    ) -> None:
        """Keep the path of every sequence's tree, in place, and drop the rest of the tree.

        Sequence b keeps position ``starts[b] + paths[b][i]`` as ``starts[b] + i``.

        Args:
            starts: length of every sequence before its tree was read.
            paths: nodes of each path, increasing, as they are along a path of a tree.
            nodes: the same as ``[M]`` long tensors, if they are on the device already.
        """
        # An increasing path that ends at M - 1 is 0..M-1: those positions are in place.
        if any(path and path[-1] != len(path) - 1 for path in paths):
            self._move(starts, paths, nodes)
        self._set_lengths([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` rows."""
        if not 0 <= length <= self.length:
            raise FalconLabError(f"cannot keep {length} of the KV cache's {self.length} rows")
        self._set_length(length)

    def begin(
        self, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> None:
        """Say where the coming pass writes: behind the first ``starts[0]`` rows."""
        if starts is not None:
            self.truncate(starts[0])

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` rows, if the cache can; return whether its capacity changed."""
        return False

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

    def _move(
        self, starts: Sequence[int], paths: Sequence[Sequence[int]], nodes: Sequence[Tensor]
    ) -> None:
        """Move the positions of one path to their places."""
        start, stop = starts[0], starts[0] + len(paths[0])
        source = start + (nodes[0] if nodes else send(paths[0], self._pools[0].device))
        for pool in self._pools:
            pool[..., start:stop, :] = pool.index_select(-2, source.to(pool.device))
        if self.positions is not None:
            moved = self.positions.index_select(1, source.to(self.positions.device))
            self.positions[:, start:stop] = moved

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self._set_length(lengths[0])

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


class BatchCache(KVCache):
    """B rows of up to C positions; the first ``len(lengths)`` rows hold a sequence each.

    The rows in use lie together, so that a pass over all of them copies no keys: a sequence that
    ends gives its row to the next one (``open``), or to the last one in use (``drop``).

    A pass appends n columns to every row that it is for, at the row's own end: ``begin``, the
    forward pass, then ``keep`` with what is kept of them. What a row keeps beyond its length is
    nothing to anybody: masks leave it out (``batch_masks.py``).

    Memory: ``layout.bytes(C, B)``, taken in the first pass, and never more.

    Attributes:
        rows: B.
        lengths: valid columns of every row in use.
        length: the longest of those that the coming pass is for, and where it begins.

    Args:
        layers: L.
        rows: B.
        capacity: C, the new columns of the widest pass counted.
        layout: the rows of every layer, as for ``KVCache``.
    """

    def __init__(
        self, layers: int, rows: int, capacity: int, layout: KVLayout | None = None
    ) -> None:
        super().__init__(layers, capacity, layout)
        self.rows = rows
        self.lengths: list[int] = []
        self._of: list[int] = []  # rows of the pass
        self._starts: list[int] = []  # their first new columns
        self._picked: Tensor | None = None  # [R] rows, where they are not 0, 1, 2, …
        self._places: dict[Any, Tensor] = {}  # what is written -> [R·G·n] of [B·G·C]

    # --- sequences --------------------------------------------------------------------------

    def open(self, row: int) -> RowCache:
        """An empty cache of one sequence, whose memory is that row's."""
        return RowCache(self, row)

    def fill(self, row: int, length: int) -> None:
        """That row, one in use or the next one, now holds a sequence of ``length`` columns."""
        self.lengths[row : row + 1] = [length]

    def drop(self, row: int) -> None:
        """End that row's sequence; the last row's moves there."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if row != last:
            self.copy_row(last, row, length)
            self.lengths[row] = length

    def copy_row(self, source: int, goal: int, length: int) -> None:
        """The first ``length`` columns of one row over those of another."""
        for pool in self._pools:
            pool[..., goal, :, :length, :] = pool[..., source, :, :length, :]
        if self.positions is not None:
            self.positions[goal, :length] = self.positions[source, :length]

    # --- passes -----------------------------------------------------------------------------

    def begin(self, rows: Sequence[int] | None = None, starts: Sequence[int] | None = None) -> None:
        """Say where the coming pass writes.

        Args:
            rows: R of the rows; None for those in use.
            starts: the first new column of each; None where the rows end.
        """
        self._of = list(range(len(self.lengths)) if rows is None else rows)
        self._starts = [self.lengths[row] for row in self._of] if starts is None else list(starts)
        self.length = max(self._starts, default=0)
        self._places = {}
        self._picked = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, G, n, D]`` states to a layer; its rows of the pass, ``[R, G, S, D]``.

        S reaches to the end of the longest row.

        Raises:
            FalconLabError: when the columns do not fit.
        """
        stop = self.length + key_states.shape[2]
        if stop > self.capacity:
            raise FalconLabError(
                f"the KV cache holds {self.capacity} positions of a sequence and {stop} are "
                "needed; make it with the prompt, the new tokens and the largest tree in mind"
            )
        memory = self._rows[layer_idx] or self.allocate(layer_idx, key_states, value_states)
        seen = []
        for states, pool in zip((key_states, value_states), memory, strict=True):
            self._write(pool, states)
            seen.append(self._of_the_pass(pool)[:, :, :stop])
        return seen[0], seen[1]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note the positions ``[R, n]`` of the columns that the coming pass writes.

        Returns:
            ``[R, S]``, the positions of every column that it sees.
        """
        table = self.position_table(positions)
        place = self._place(1, positions.shape[1], table.device)
        table.view(-1)[place] = positions.expand(len(self._of), -1).reshape(-1)
        return self._of_the_pass(table)[:, : self.length + positions.shape[1]]

    def position_table(self, like: Tensor) -> Tensor:
        """``[B, C]`` positions of all rows, made at the first call."""
        if self.positions is None:
            self.positions = _blank(like, (self.rows, self.capacity))
        return self.positions

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Memory of a layer for all rows, ``[B, G, C, D]`` each, if it has none yet."""
        made = self._rows[layer]
        if made is not None:
            return made
        whole = (_no_columns(states, self.rows) for states in (key, value))
        return self._allocate(layer, *whole)

    def _move(
        self, starts: Sequence[int], paths: Sequence[Sequence[int]], nodes: Sequence[Tensor]
    ) -> None:
        """Move all that is not in its place; a source may be another one's goal."""
        moves = [
            (row, start + node, start + place)
            for row, (start, path) in enumerate(zip(starts, paths, strict=True))
            for place, node in enumerate(path)
            if place != node
        ]
        places: dict[torch.device, Tensor] = {}

        def on(device: torch.device) -> Tensor:
            if device not in places:
                places[device] = send(moves, device).T
            return places[device]

        for pool in self._pools:
            row, source, goal = on(pool.device)
            pool[..., row, :, goal, :] = pool[..., row, :, source, :]
        if self.positions is not None:
            row, source, goal = on(self.positions.device)
            self.positions[row, goal] = self.positions[row, source]

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths[: len(lengths)] = lengths

    # --- places -----------------------------------------------------------------------------

    def _write(self, pool: Tensor, states: Tensor) -> None:
        new = states.shape[2]
        if len(self._of) == 1:
            row, start = self._of[0], self._starts[0]
            pool[row, :, start : start + new] = states[0]
            return
        size = pool.shape[-1]
        place = self._place(pool.shape[1], new, pool.device)
        pool.view(-1, size).index_copy_(0, place, states.reshape(-1, size))

    def _place(self, heads: int, new: int, device: torch.device) -> Tensor:
        """``[R·G·n]``: where the new states are in the flattened ``[B, G, C]``."""
        key = heads, new, device
        if key not in self._places:
            row, start = send([self._of, self._starts], device)[..., None, None]
            head = torch.arange(heads, device=device)[:, None]
            column = start + torch.arange(new, device=device)
            place = ((row * heads + head) * self.capacity + column).flatten()
            self._places[key] = place
        return self._places[key]

    def _of_the_pass(self, pool: Tensor) -> Tensor:
        """``[B, …]`` -> ``[R, …]``, without a copy where the rows are the first ones."""
        count = len(self._of)
        if count == 1:
            return pool[self._of[0] : self._of[0] + 1]
        if self._of == list(range(count)):
            return pool[:count]
        if self._picked is None:
            self._picked = send(self._of, pool.device)
        return pool.index_select(0, self._picked)

    def _set_length(self, length: int) -> None:
        super()._set_length(length)
        self.lengths = [length] * len(self.lengths)


class RowCache(KVCache):
    """One row of a ``BatchCache`` as the cache of one sequence, to read its prompt into.

    Args:
        whole: where the memory is.
        row: which row of it.
    """

    def __init__(self, whole: BatchCache, row: int) -> None:
        super().__init__(len(whole._rows), whole.capacity)
        self._whole = whole
        self._row = slice(row, row + 1)

    def move(self, row: int) -> None:
        """Go to another row, with what was read so far."""
        self._whole.copy_row(self._row.start, row, self.length)
        self._row = slice(row, row + 1)
        for layer, old in enumerate(self._rows):
            if old is not None:
                self._allocate(layer, *old)
        if self.positions is not None:
            self.positions = self._whole.position_table(self.positions)[self._row]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note the positions ``[1, n]`` of the coming rows; ``[1, length + n]``, all of them."""
        self.positions = self._whole.position_table(positions)[self._row]
        return super().record_positions(positions)

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._whole.allocate(layer, key, value)
        self._rows[layer] = found = keys[self._row], values[self._row]
        return found


def _no_columns(states: Tensor, rows: int) -> Tensor:
    """An empty tensor that says what ``rows`` sequences of such states need."""
    return states.new_empty(rows, states.shape[1], 0, states.shape[3])


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
