"""A KV cache of several sequences, each of its own length, and the one-sequence view of a row.

Shapes: L layers, B rows, R rows of a pass, G key/value heads, C capacity, n new columns,
S columns seen, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.targets.kv_cache import KVCache, _blank
from falcon_lab.targets.kv_layout import KVLayout
from falcon_lab.targets.sending import send


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

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Each row of the pass keeps its new columns ``path[i]`` as columns i and forgets the rest.

        Args:
            paths: of every row of the pass, increasing, as node indices along a path of a tree.
        """
        moves = [
            (row, start + node, start + place)
            for row, start, path in zip(self._of, self._starts, paths, strict=True)
            for place, node in enumerate(path)
            if place != node
        ]
        if moves:
            self._move(moves)
        for row, start, path in zip(self._of, self._starts, paths, strict=True):
            self.lengths[row] = start + len(path)

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

    def _move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Row, source and goal of columns; a source may be another one's goal."""
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

    def reserve(self, rows: int) -> bool:
        """A row's room is what it is: it never changes. (Too little is an error of ``update``.)"""
        return False

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
