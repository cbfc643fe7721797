"""A forward replayed as CUDA graphs, over a cache whose memory stays where it is.

A graph knows shapes and addresses, and nothing else: where new keys go, the attention mask and the
length of the context are all read from tensors. Keys that every new position attends to,
``earlier`` of them, need no mask, which lets a kernel without one read them (``attention/``); the
rest, a tail of fixed width behind them, is attended to under a mask made on the device. As the text
grows, the next graph is used every so many keys.

Shapes: n new positions, N the same with padding, W columns of a mask, O of them about older keys,
T keys of the tail, G key/value heads, C capacity, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from falcon_lab.interfaces import Announce, Outputs, Recorder, Run
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.passes import (
    Forward,
    ForwardPass,
    Inputs,
    NewPositions,
    Shapes,
    shapes_of,
    size_for,
)
from falcon_lab.model.recording import Attempts

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""New positions of a graph. Weights are read once for all: a few more cost next to nothing."""

PADDING = 64
"""Cache positions beyond what is needed, for padding (the widest gap between sizes)."""

STEP = 256
"""Keys after which the next graph is used; long contexts have longer steps (1/32 to 1/64)."""


class GraphStorage:
    """Memory for one sequence, and the graphs over it.

    A new cache reuses the memory of the one before, which is empty from then on. So one
    sequence is decoded at a time, and every one finds the graphs ready. The memory grows when a
    longer sequence comes, and its graphs are captured anew.

    Args:
        forward: whose keys and values are kept.
        attempts: captures.
        step: keys after which the next graph is used, in short contexts; a power of two.
    """

    def __init__(self, forward: Forward, attempts: Attempts, step: int = STEP) -> None:
        self._forward = forward
        self._attempts = attempts
        self._step = step
        self._lent: KVCache | None = None
        self._keys: list[Tensor] = []  # of the memory that the graphs were captured over
        self._graphs: dict[Hashable, Run] = {}

    def capacity(self, positions: int) -> int:
        """Return C of the cache that a sequence gets: rounded up, so that few differ."""
        needed = positions + PADDING
        unit = max(self._step, 1 << max(0, needed.bit_length() - 4))
        rounded = -(-needed // unit) * unit
        return rounded if self._lent is None else max(rounded, self._lent.capacity)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the next cache reuses."""
        return 0 if self._lent is None else self._lent.nbytes

    def new_cache(self, positions: int, most: int | None = None) -> KVCache:
        """Return an empty cache for one sequence; the one before holds nothing from now on.

        Args:
            positions: that are needed.
            most: positions up to which it doubles when more are needed.
        """
        capacity = self.capacity(positions)
        before, self._lent = self._lent, None
        if before is not None:
            taken_over = before.hand_over()
            if taken_over.capacity >= capacity and taken_over.sequences < 2:
                self._lent = taken_over
                return taken_over
            self._forget()
            del taken_over  # gone before more is taken
        layout = self._forward.layout
        self._lent = KVCache(len(layout.layers), capacity, layout, most or capacity)
        return self._lent

    def owns(self, cache: KVCache) -> bool:
        """Return whether graphs can be over a cache: the newest one, with some context."""
        return cache is self._lent and cache.length > 0

    def replay(
        self, key: tuple[Hashable, ...], tail: Tail, cache: KVCache, body: Body
    ) -> Outputs | None:
        """Run a pass as a graph, captured at the first time; None where that is impossible.

        Args:
            key: of the pass; passes of one key are the same but for what their inputs hold.
            tail: filled, and the key's own.
            cache: the pass writes behind its positions, and does not count what it writes.
            body: the pass.

        Returns:
            The graph's own tensors, to be looked at before the next replay.
        """
        keys, values = cache.tensors()
        if keys is not self._keys:  # it has grown, or is the first
            self._forget()
            self._keys = keys
        earlier = floor_of(max(0, cache.length - tail.older), self._step)
        run = self._graphs.get((*key, earlier))
        if run is None:
            reach = earlier + step_of(earlier, self._step) + tail.older + tail.size
            seen = min(reach, cache.capacity)
            positions = cache.positions

            def whole() -> Outputs:
                index = tail.start + tail.count
                cache = StaticPositions(keys, values, positions, index, seen)
                return body(cache, tail.seen(earlier, seen))

            captured = self._attempts.capture(whole)
            if captured is None:
                self._forget()
                return None
            run = self._graphs[*key, earlier] = captured
        return run()

    def _forget(self) -> None:
        self._keys = []
        self._graphs.clear()


@dataclass(frozen=True, slots=True)
class Tail:
    """Where the N new keys of a pass go and their attention mask, at addresses that stay.

    Attributes:
        mask: ``[N, O + N]`` bool, over O older keys and the new ones.
        blank: the same with every position attending to itself and what is older.
        start: ``[]`` long, where the first of the new keys goes.
        count: ``[N]`` long, 0, 1, 2, …
    """

    mask: Tensor
    blank: Tensor
    start: Tensor
    count: Tensor

    @classmethod
    def empty(cls, size: int, older: int, device: torch.device) -> Tail:
        """Return one for N new keys behind O older ones."""
        with torch.inference_mode(False):
            blank = torch.eye(size, older + size, dtype=torch.bool, device=device).roll(older, 1)
            blank[:, :older] = True
            start = torch.zeros((), dtype=torch.long, device=device)
            return cls(blank.clone(), blank, start, torch.arange(size, device=device))

    @property
    def size(self) -> int:
        """Return N, the new tokens of the pass."""
        return self.mask.shape[0]

    @property
    def older(self) -> int:
        """Return O, the older keys, which all positions attend to."""
        return self.mask.shape[1] - self.size

    def fill(self, mask: Tensor | None, new: int, start: int) -> None:
        """Take a pass's own values in.

        Args:
            mask: ``[n, W]`` bool over the last W keys, n <= W <= O + n, all keys before them being
                attended to; None: every position attends to every key.
            new: n; the rest is padding, which attends to itself and what is older.
            start: where the first of the new keys goes.
        """
        self.start.fill_(start)
        width = new if mask is None else mask.shape[1]
        if new < self.size or width < self.older + new:
            self.mask.copy_(self.blank)
        seen = self.mask[:new, self.older + new - width : self.older + new]
        if mask is not None:
            seen.copy_(mask)
        elif self.size > 1:
            seen.fill_(True)

    def seen(self, earlier: int, stop: int) -> Tensor:
        """Return the mask ``[N, T]`` over the keys from ``earlier`` to ``stop``."""
        width, older = self.mask.shape[1], self.older
        column = torch.arange(earlier + older, stop + older, device=self.mask.device) - self.start
        inside = self.mask.index_select(1, column.clamp(0, width - 1)) & (column < width)
        return inside | (column < 0)


class StaticPositions(Cache):
    """As ``KVCache``, for capturing: a tensor says where new keys go, and all shapes are fixed.

    Args:
        keys, values: of every layer, ``[1, G, C, D]``.
        positions: ``[1, C]`` of the keys, where layers have a window.
        index: ``[N]`` long, where the new keys go.
        seen: keys that a layer is given.
    """

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        positions: Tensor | None,
        index: Tensor,
        seen: int,
    ) -> None:
        super().__init__(layers=[])
        self._keys, self._values, self._positions = keys, values, positions
        self._index = index
        self._seen = seen

    @property
    def length(self) -> int:
        """Return the number of keys before the new ones, as far as shapes are concerned."""
        return self._seen - self._index.shape[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return those that the pass is about."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(2, self._index, key_states.to(keys.dtype))
        values.index_copy_(2, self._index, value_states.to(values.dtype))
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note the positions of the new keys, and return those of all keys."""
        assert self._positions is not None
        self._positions.index_copy_(1, self._index, positions)
        return self._positions[:, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the keys that a query attends to, and their offset."""
        return self._seen, 0


Body = Callable[[StaticPositions, Tensor], Outputs]
"""Cache and ``[N, T]`` mask -> what a pass puts out."""


def step_of(keys: int, least: int = STEP) -> int:
    """Return the number of keys between one graph and the next, around so many of them."""
    return max(least, 1 << max(0, keys.bit_length() - 6))


def floor_of(keys: int, least: int = STEP) -> int:
    """Return the earlier keys of the graph that serves so many. (All steps are powers of two.)"""
    step = step_of(keys, least)
    return keys // step * step


class GraphPass(ForwardPass):
    """A forward replayed as CUDA graphs, one for each of the padded shapes that come.

    Captured once or never: what cannot be captured goes through the module, which is announced
    once.

    Args:
        forward: its weights are read where they are now; move it before.
        announce: is called with one line for the user, if there can be no graphs.
        recorder: captures.
        step: as of ``GraphStorage``.
    """

    def __init__(
        self, forward: Forward, announce: Announce, recorder: Recorder, *, step: int = STEP
    ) -> None:
        super().__init__(forward)
        self._attempts = Attempts(forward.name, recorder, announce)
        self._storage = GraphStorage(forward, self._attempts, step)
        self._buffers: dict[tuple[Hashable, ...], Buffers] = {}
        self._without_cache: dict[Shapes, Run] = {}

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes of the last cache, which the next one reuses."""
        return self._storage.nbytes

    def capacity(self, positions: int) -> int:
        """Return the capacity, rounded up, so that few differ."""
        return self._storage.capacity(positions)

    def new_cache(self, positions: int, most: int | None = None) -> KVCache:
        """Return an empty cache for one sequence; the one before holds nothing from now on."""
        return self._storage.new_cache(positions, most)

    def prepare(self, most: int) -> None:
        """Do nothing yet: a graph is captured when a pass of its shape first comes."""

    def supports(self, inputs: Inputs, new: NewPositions | None) -> bool:
        """Return whether these are replayed: no prompts, and no cache from elsewhere."""
        if self._attempts.failed or not self._forward.supports(inputs):
            return False
        few = new is None or new.positions.shape[0] <= SIZES[-1]
        return few and (new is None or self._storage.owns(new.cache))

    def _run(self, inputs: Inputs, new: NewPositions | None) -> Outputs | None:
        forward, shapes = self._forward, shapes_of(inputs)
        padded = forward.padded(shapes, SIZES) if forward.pads_graphs else shapes
        if new is None:
            outputs = self._replay_alone(inputs, padded)
        else:
            outputs = self._replay(inputs, padded, new)
        if outputs is None:
            return None
        if padded != shapes:
            outputs = forward.trimmed(outputs, inputs)
        return tuple(output.clone() for output in outputs)

    def _replay_alone(self, inputs: Inputs, padded: Shapes) -> Outputs | None:
        if padded not in self._buffers:
            self._buffers[padded] = Buffers.like(inputs, padded)
        buffers = self._buffers[padded]
        buffers.fill(inputs)
        run = self._without_cache.get(padded)
        if run is None:
            run = self._attempts.capture(lambda: self._forward(buffers.inputs, None))
            if run is None:
                return None
            self._without_cache[padded] = run
        return run()

    def _replay(self, inputs: Inputs, padded: Shapes, new: NewPositions) -> Outputs | None:
        positions, mask, cache = new
        count = positions.shape[0]
        size = self._forward.count(padded)
        earlier = 0 if mask is None else mask.shape[1] - count
        if earlier > SIZES[-1] or cache.length + size > cache.capacity:
            return None
        older = size_for(earlier, (0, *SIZES))
        key = (size, older, *padded)
        if key not in self._buffers:
            buffers = Buffers.like(inputs, padded)
            self._buffers[key] = buffers.with_positions(size, older, positions.device)
        buffers = self._buffers[key]
        buffers.fill(inputs)
        assert buffers.positions is not None
        assert buffers.tail is not None
        buffers.positions[:count].copy_(positions)
        buffers.tail.fill(mask, count, cache.length)

        def body(cache: StaticPositions, mask: Tensor) -> Outputs:
            assert buffers.positions is not None
            found: Outputs = self._forward(
                buffers.inputs, NewPositions(buffers.positions, mask, cache)
            )
            return found

        outputs = self._storage.replay(key, buffers.tail, cache, body)
        if outputs is not None:
            cache.advance(count)
        return outputs


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a pass reads, at addresses that stay.

    Attributes:
        inputs: of the forward, padded.
        positions: ``[N]`` long, of a pass over a cache.
        tail: where its new keys go, and its mask.
    """

    inputs: Inputs
    positions: Tensor | None = None
    tail: Tail | None = None

    @classmethod
    def like(cls, inputs: Inputs, shapes: Shapes) -> Buffers:
        """Return zeros of these shapes, each of the dtype and on the device of an input."""
        parts = zip(inputs, shapes, strict=True)
        with torch.inference_mode(False):
            return cls([torch.zeros(shape, dtype=p.dtype, device=p.device) for p, shape in parts])

    def with_positions(self, size: int, older: int, device: torch.device) -> Buffers:
        """Return the same with N positions behind O older ones."""
        with torch.inference_mode(False):
            positions = torch.zeros(size, dtype=torch.long, device=device)
        return replace(self, positions=positions, tail=Tail.empty(size, older, device))

    def fill(self, inputs: Inputs) -> None:
        """Copy inputs in; what is behind them stays what it was."""
        for buffer, part in zip(self.inputs, inputs, strict=True):
            place = buffer
            if buffer.shape != part.shape:
                place = buffer[tuple(slice(size) for size in part.shape)]
            place.copy_(part)
