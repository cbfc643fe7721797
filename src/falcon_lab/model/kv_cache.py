"""A preallocated KV cache behind the layered cache interface of Hugging Face.

Every layer stores every position, sliding-window layers too: windows are written into the mask
(``backbone.py``), so that a tree can be verified and its accepted path committed in one way for all
families. Keys are rotated when they are written, at their final position.

Shapes: L layers, B sequences, R sequences of a pass, G key/value heads, C capacity, n new tokens,
S positions seen, D head size, M committed positions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from falcon_lab.errors import FalconLabError
from falcon_lab.model.kv_layout import KVLayout
from falcon_lab.model.masks import send


class KVCache(Cache):
    """Keys and values of one sequence, written, moved and dropped in place.

    A forward pass appends its n tokens at ``length``. ``commit`` retains a path of what was read
    after a point and ``truncate`` drops the newest. Memory is allocated at the first update, when
    the shapes are known. (A batch of sequences of one length works alike.)

    Attributes:
        capacity: C, positions that fit.
        length: positions that are valid after the last forward pass.
        positions: ``[B or 1, C]`` long, where every token stands in its text; kept for sliding
            windows alone (None until ``record_positions``).

    Args:
        layers: L.
        capacity: C.
        layout: what every layer stores; without it all are taken for like the first that comes,
            and one that is not gets memory of its own beside the share that it leaves unused.
        most: positions up to which ``reserve`` doubles the capacity; beyond them it grows to what
            is needed and no further. None: the capacity never changes.
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        layout: KVLayout | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self.positions: Tensor | None = None
        self._filled = [0] * layers
        self._states: list[tuple[Tensor, Tensor] | None] = [None] * layers  # each [B, G, C, D]
        self._layout = layout
        self._most = most
        self._flat: tuple[list[Tensor], list[Tensor]] | None = None  # _states, for ``tensors``
        self._pools: list[Tensor] = []  # [..., C, D]: what commit moves states in
        self._shared: dict[tuple[int, ...], list[Tensor]] = {}  # layers -> their two pools

    @property
    def layout(self) -> KVLayout:
        """Return what every layer stores: as given, or as far as it is known by now."""
        if self._layout is not None:
            return self._layout
        return KVLayout.of(self._states, positions=self.positions is not None)

    @property
    def sequences(self) -> int:
        """Return B, or 0 before the first update."""
        return self._pools[0].shape[-4] if self._pools else 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        positions = 0 if self.positions is None else self.positions.nbytes
        return sum(pool.nbytes for pool in self._pools) + positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, G, n, D]`` states to a layer; return all of it, ``[B, G, length + n, D]``.

        Raises:
            FalconLabError: they do not fit.
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
        states = self._states[layer_idx]
        if states is None:
            states = self._allocate(layer_idx, key_states, value_states)
        keys, values = states
        keys[:, :, start:stop] = key_states
        values[:, :, start:stop] = value_states
        self._filled[layer_idx] = self.length = stop
        return keys[:, :, :stop], values[:, :, :stop]

    def tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return keys and values of all layers, ``[B, G, C, D]`` each.

        They are for a pass that writes its states itself and then calls ``advance``.

        Raises:
            FalconLabError: a layer stores nothing of its own, or nothing was read yet.
        """
        if self._flat is None:
            pairs = [pair for pair in self._states if pair is not None]
            if len(pairs) < len(self._states):
                raise FalconLabError("not every layer has keys and values of its own")
            self._flat = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return self._flat

    def advance(self, new: int) -> None:
        """Count ``new`` tokens that were written at ``length``."""
        self._set_length(self.length + new)

    def commit(
        self,
        starts: Sequence[int],
        paths: Sequence[Sequence[int]],
        nodes: Sequence[Tensor] = (),
    ) -> None:
        """Commit the path of every sequence's tree, in place, and drop the rest of the tree.

        Position ``starts[b] + paths[b][i]`` of sequence b becomes ``starts[b] + i``.

        Args:
            starts: length of every sequence before its tree was read.
            paths: nodes of each path, increasing, as they are along a path of a tree.
            nodes: the same as ``[M]`` long tensors, if they are on the device already.
        """
        # An increasing path that ends at M - 1 is 0..M-1: those positions are in place.
        if any(path and path[-1] != len(path) - 1 for path in paths):
            self._move(starts, paths, nodes)
        self._set_lengths([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def arrange(self, starts: Sequence[int], slots: Sequence[Sequence[int]]) -> None:
        """Move what lies behind the first positions of every sequence, in all layers.

        What stood at ``starts[b] + slots[b][i]`` of sequence b stands at ``starts[b] + i`` then;
        lengths stay as they are.
        """
        if any(list(order) != list(range(len(order))) for order in slots):
            self._move(starts, slots, ())

    def truncate(self, length: int) -> None:
        """Truncate to the first ``length`` positions."""
        if not 0 <= length <= self.length:
            raise FalconLabError(f"cannot cut the KV cache's {self.length} positions to {length}")
        self._set_length(length)

    def resume(self, length: int) -> None:
        """Take the first positions of the memory as read: an earlier text began with the same."""
        self.length = length
        self._filled = [0 if pair is None else length for pair in self._states]

    def begin(
        self, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> None:
        """Prepare a pass that writes from ``starts[0]`` on; None: at the end.

        All layers write there, those too that the pass before has left out.
        """
        self.truncate(self.length if starts is None else starts[0])

    def reserve(self, positions: int) -> bool:
        """Make room for that many positions, if the cache may grow; the old ones stay.

        Returns:
            Whether the capacity changed.
        """
        if self._most is None or positions <= self.capacity:
            return False
        self.capacity = max(positions, min(2 * self.capacity, self._most))
        old, self._states = self._states, [None] * len(self._states)
        self._pools, self._shared = [], {}
        for layer, pair in enumerate(old):
            if pair is not None:
                valid = [states[:, :, : self.length] for states in pair]
                for new, kept in zip(self._allocate(layer, *valid), valid, strict=True):
                    new[:, :, : self.length] = kept
        if self.positions is not None:
            with torch.inference_mode(False):
                more = self.capacity - self.positions.shape[1]
                self.positions = functional.pad(self.positions, (0, more))
        return True

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note where the n tokens of the coming pass stand in their text, ``[B or 1, n]``.

        Returns:
            ``[B or 1, length + n]``, the same of all tokens.
        """
        stop = self.length + positions.shape[1]
        if self.positions is None:
            self.positions = _blank(positions, (positions.shape[0], max(self.capacity, stop)))
        self.positions[:, self.length : stop] = positions
        return self.positions[:, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return ``length``, by Hugging Face's name."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many keys a query of that length attends to, and their offset."""
        return self.length + int(query_length), 0

    def hand_over(self) -> Self:
        """Return an empty cache with this one's memory; this one holds nothing from then on."""
        other = copy.copy(self)
        other.reset()
        self.capacity, self._states, self._flat = 0, [None] * len(self._states), None
        self._pools, self._shared, self.positions = [], {}, None
        self._set_length(0)
        return other

    def reset(self) -> None:
        """Drop all positions; the memory stays allocated."""
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
        # Layers that store nothing of their own (they read another layer's) stay empty.
        self._filled = [length if filled else 0 for filled in self._filled]

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Allocate a layer: a slice of the pool of all layers that store the same.

        One pool makes a commit two kernels instead of two per layer.
        """
        layout = self._layout
        alike = tuple(range(len(self._states))) if layout is None else layout.alike(layer)
        if alike not in self._shared:
            self._shared[alike] = [self._pool(states, len(alike)) for states in (key, value)]
            self._pools += self._shared[alike]
        keys, values = (pool[alike.index(layer)] for pool in self._shared[alike])
        if not (_fits(keys, key) and _fits(values, value)):
            keys, values = self._own(key), self._own(value)
            self._pools += [keys, values]
        self._states[layer] = keys, values
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


def _fits(kept: Tensor, states: Tensor) -> bool:
    return (kept.shape[0], kept.shape[1], kept.shape[3], kept.dtype, kept.device) == (
        states.shape[0],
        states.shape[1],
        states.shape[3],
        states.dtype,
        states.device,
    )


class BatchCache(KVCache):
    """B places for sequences, each of its own length; the first ``len(lengths)`` are in use.

    They lie together, so that a pass over all sequences copies no keys: one that ends gives its
    place to the next one (``open``), or to the last one in use (``drop``).

    A pass appends n tokens to every sequence that it is for, at its own end: ``begin``, the
    forward pass, then ``commit``. What lies beyond a sequence's length is left out by the masks
    (``batch_tree_mask``).

    Memory: ``layout.bytes(C, B)``, allocated in the first pass, and never more.

    Attributes:
        places: B.
        lengths: valid positions of every sequence in use.
        length: the longest of those that the coming pass is for, and where it begins.

    Args:
        layers: L.
        places: B.
        capacity: C, the new tokens of the widest pass counted.
        layout: what every layer stores, as for ``KVCache``.
    """

    def __init__(
        self, layers: int, places: int, capacity: int, layout: KVLayout | None = None
    ) -> None:
        super().__init__(layers, capacity, layout)
        self.places = places
        self.lengths: list[int] = []
        self._of: list[int] = []  # places that the pass is for
        self._starts: list[int] = []  # where it writes in each
        self._picked: Tensor | None = None  # [R] places, where they are not 0, 1, 2, …
        self._targets: dict[Any, Tensor] = {}  # what is written -> [R·G·n] of [B·G·C]

    # --- sequences --------------------------------------------------------------------------

    def open(self, place: int) -> PlaceCache:
        """Return an empty cache of one sequence, whose memory is that place's."""
        return PlaceCache(self, place)

    def fill(self, place: int, length: int) -> None:
        """Take the sequence of that length into use: in place of another one, or as the last."""
        self.lengths[place : place + 1] = [length]

    def drop(self, place: int) -> None:
        """End a sequence; the last one moves to its place."""
        length = self.lengths.pop()
        last = len(self.lengths)
        if place != last:
            self.copy_sequence(last, place, length)
            self.lengths[place] = length

    def copy_sequence(self, source: int, goal: int, length: int) -> None:
        """Copy the first ``length`` positions of one place over those of another."""
        for pool in self._pools:
            pool[..., goal, :, :length, :] = pool[..., source, :, :length, :]
        if self.positions is not None:
            self.positions[goal, :length] = self.positions[source, :length]

    # --- passes -----------------------------------------------------------------------------

    def begin(
        self, sequences: Sequence[int] | None = None, starts: Sequence[int] | None = None
    ) -> None:
        """Prepare a pass.

        Args:
            sequences: R places that it is for; None for those in use.
            starts: where it writes in each; None where the sequences end.
        """
        self._of = list(range(len(self.lengths)) if sequences is None else sequences)
        self._starts = (
            [self.lengths[place] for place in self._of] if starts is None else list(starts)
        )
        self.length = max(self._starts, default=0)
        self._targets = {}
        self._picked = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write ``[R, G, n, D]`` states to a layer; return the layer's of all keys.

        ``[R, G, S, D]`` each, where S reaches to the end of the longest sequence.

        Raises:
            FalconLabError: they do not fit.
        """
        stop = self.length + key_states.shape[2]
        if stop > self.capacity:
            raise FalconLabError(
                f"the KV cache holds {self.capacity} positions of a sequence and {stop} are "
                "needed; make it with the prompt, the new tokens and the largest tree in mind"
            )
        memory = self._states[layer_idx] or self.allocate(layer_idx, key_states, value_states)
        seen = []
        for states, pool in zip((key_states, value_states), memory, strict=True):
            self._write(pool, states)
            seen.append(self._of_the_pass(pool)[:, :, :stop])
        return seen[0], seen[1]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note where the n tokens of the coming pass stand in their texts, ``[R, n]``.

        Returns:
            ``[R, S]``, the same of all tokens that it attends to.
        """
        table = self.position_table(positions)
        goal = self._target(1, positions.shape[1], table.device)
        table.view(-1)[goal] = positions.expand(len(self._of), -1).reshape(-1)
        return self._of_the_pass(table)[:, : self.length + positions.shape[1]]

    def position_table(self, like: Tensor) -> Tensor:
        """Return the ``[B, C]`` positions of all sequences, made at the first call."""
        if self.positions is None:
            self.positions = _blank(like, (self.places, self.capacity))
        return self.positions

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's memory, ``[B, G, C, D]`` each, made at the first call."""
        made = self._states[layer]
        if made is not None:
            return made
        empty = (states[:1, :, :0].expand(self.places, -1, -1, -1) for states in (key, value))
        return self._allocate(layer, *empty)

    def _move(
        self, starts: Sequence[int], paths: Sequence[Sequence[int]], nodes: Sequence[Tensor]
    ) -> None:
        """Move all that is not in its place; a source may be another move's goal."""
        moves = [
            (place, start + node, start + number)
            for place, (start, path) in enumerate(zip(starts, paths, strict=True))
            for number, node in enumerate(path)
            if number != node
        ]
        sent = send(moves, self._pools[0].device).T
        for pool in self._pools:
            place, source, goal = sent.to(pool.device)
            pool[..., place, :, goal, :] = pool[..., place, :, source, :]
        if self.positions is not None:
            place, source, goal = sent.to(self.positions.device)
            self.positions[place, goal] = self.positions[place, source]

    def _set_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths[: len(lengths)] = lengths

    # --- where states go --------------------------------------------------------------------

    def _write(self, pool: Tensor, states: Tensor) -> None:
        new = states.shape[2]
        if len(self._of) == 1:
            place, start = self._of[0], self._starts[0]
            pool[place, :, start : start + new] = states[0]
            return
        size = pool.shape[-1]
        goal = self._target(pool.shape[1], new, pool.device)
        pool.view(-1, size).index_copy_(0, goal, states.reshape(-1, size))

    def _target(self, heads: int, new: int, device: torch.device) -> Tensor:
        """Return where the new states go in the flattened ``[B, G, C]``, ``[R·G·n]``."""
        key = heads, new, device
        if key not in self._targets:
            place, start = send([self._of, self._starts], device)[..., None, None]
            head = torch.arange(heads, device=device)[:, None]
            position = start + torch.arange(new, device=device)
            self._targets[key] = ((place * heads + head) * self.capacity + position).flatten()
        return self._targets[key]

    def _of_the_pass(self, pool: Tensor) -> Tensor:
        """Return ``[R, …]`` of ``[B, …]``, without a copy where the places are the first ones."""
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


class PlaceCache(KVCache):
    """One place of a ``BatchCache`` as the cache of one sequence, to read its prompt into.

    Args:
        whole: where the memory is.
        place: which part of it.
    """

    def __init__(self, whole: BatchCache, place: int) -> None:
        super().__init__(len(whole._states), whole.capacity)
        self._whole = whole
        self._place = slice(place, place + 1)

    def resume(self, length: int) -> None:
        """Take the first positions of the place as read: the text before began with the same."""
        of_place = (
            None if pair is None else (pair[0][self._place], pair[1][self._place])
            for pair in self._whole._states
        )
        self._states = list(of_place)
        super().resume(length)

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note where the coming tokens stand, ``[1, n]``; return all, ``[1, length + n]``."""
        self.positions = self._whole.position_table(positions)[self._place]
        return super().record_positions(positions)

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._whole.allocate(layer, key, value)
        self._states[layer] = found = keys[self._place], values[self._place]
        return found
