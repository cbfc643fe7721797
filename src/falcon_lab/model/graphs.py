"""The cache that CUDA graphs work on, and what they read of it.

A graph knows shapes and addresses, and nothing else: where new rows go, who sees whom and how long
the context is are all read from tensors. Keys that every row sees for sure, ``earlier`` of them,
need no mask, which lets a kernel without one read them (``targets/attention``); the rest, a tail of
fixed width behind them, is seen under a mask made on the device. As the text grows, the next graph
takes over every so many keys.

Shapes: n new rows, N rows of a graph (n and padding), W columns of a mask, O columns of older rows
in it, T keys of the tail, G key/value heads, C capacity, D head size.

Decoder blocks replayed as CUDA graphs for a fixed number of new rows, over a cache that stays.

Shapes: n new rows, N rows of a graph (n and padding), W columns of a mask, L tapped layers,
H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from falcon_lab.interfaces import Announce, Outputs, Recorder, Run
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import GrowingCache, KVCache
from falcon_lab.model.recording import Attempts

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Rows of a graph. Weights are read once for all of them: a few more cost next to nothing."""

SPARE = 64
"""Cache rows beyond what is needed, for the padding of a pass (the widest gap between sizes)."""

STEP = 256
"""Keys after which the next graph takes over; long contexts take longer steps (1/32 to 1/64)."""


class GraphStorage:
    """Memory for one sequence, and the graphs over it.

    A new cache takes the memory over from the one before, which holds nothing from then on. So one
    sequence is decoded at a time, and every one finds the graphs ready. The memory grows when a
    longer sequence comes, and its graphs are captured anew.

    Args:
        backbone: whose rows are kept.
        attempts: captures.
        step: keys after which the next graph takes over, in short contexts; a power of two.
    """

    def __init__(self, backbone: Backbone, attempts: Attempts, step: int = STEP) -> None:
        self._backbone = backbone
        self._attempts = attempts
        self._step = step
        self._lent: GrowingCache | None = None
        self._keys: list[Tensor] = []  # of the memory that the graphs were captured over
        self._graphs: dict[Hashable, Run] = {}

    def capacity(self, rows: int) -> int:
        """C of the cache that a sequence of so many rows gets: rounded up, so that few differ."""
        rows += SPARE
        unit = max(self._step, 1 << max(0, rows.bit_length() - 4))
        rounded = -(-rows // unit) * unit
        return rounded if self._lent is None else max(rounded, self._lent.capacity)

    @property
    def held(self) -> int:
        """Bytes that the next cache takes over."""
        return 0 if self._lent is None else self._lent.nbytes

    def new_cache(self, rows: int, most: int | None = None) -> GrowingCache:
        """An empty cache for one sequence; the one before is empty-handed from now on.

        Args:
            rows: that are needed.
            most: rows up to which it doubles when more are needed.
        """
        capacity = self.capacity(rows)
        before, self._lent = self._lent, None
        if before is not None:
            taken_over = before.hand_over()
            if taken_over.capacity >= capacity and taken_over.sequences < 2:
                self._lent = taken_over
                return taken_over
            self._forget()
            del taken_over  # gone before more is taken
        layers = self._backbone.config.num_hidden_layers
        self._lent = GrowingCache(layers, capacity, self._backbone.layout, most or capacity)
        return self._lent

    def takes(self, cache: KVCache) -> bool:
        """Whether there are graphs over a cache: over the one that was asked for last."""
        return cache is self._lent and cache.length > 0 and not self._attempts.failed

    def replay(
        self, key: tuple[Hashable, ...], tail: Tail, cache: KVCache, body: Body
    ) -> Outputs | None:
        """Run a pass as a graph, captured at the first time; None where that is impossible.

        Args:
            key: of the pass; passes of one key are the same but for what their inputs hold.
            tail: filled, and the key's own.
            cache: the pass is written behind its rows, which count no more than before.
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
                rows = StaticRows(keys, values, positions, tail.start + tail.count, seen)
                return body(rows, tail.seen(earlier, seen))

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
    """Where the N rows of a pass go and whom they see, at addresses that stay.

    Attributes:
        mask: ``[N, O + N]`` bool: who sees whom among O older rows and the new ones.
        blank: the same with every row seeing itself and what is older.
        start: ``[]`` long, where the first of the new rows goes.
        count: ``[N]`` long, 0, 1, 2, …
    """

    mask: Tensor
    blank: Tensor
    start: Tensor
    count: Tensor

    @classmethod
    def empty(cls, size: int, older: int, device: torch.device) -> Tail:
        """For N rows, O of them older."""
        with torch.inference_mode(False):
            blank = torch.eye(size, older + size, dtype=torch.bool, device=device).roll(older, 1)
            blank[:, :older] = True
            start = torch.zeros((), dtype=torch.long, device=device)
            return cls(blank.clone(), blank, start, torch.arange(size, device=device))

    @property
    def size(self) -> int:
        """N."""
        return self.mask.shape[0]

    @property
    def older(self) -> int:
        """O."""
        return self.mask.shape[1] - self.size

    def fill(self, mask: Tensor | None, new: int, start: int) -> None:
        """Take a pass's own values in.

        Args:
            mask: ``[n, W]`` bool, who sees whom among the last W keys, n <= W <= O + n, all that
                is before being seen; None: every row sees every key.
            new: n; the rest is padding, which sees itself and what is older.
            start: where the first of the new rows goes.
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
        """``[1, N, T]``: who sees whom among the keys from ``earlier`` to ``stop``."""
        width, older = self.mask.shape[1], self.older
        column = torch.arange(earlier + older, stop + older, device=self.mask.device) - self.start
        inside = self.mask.index_select(1, column.clamp(0, width - 1)) & (column < width)
        return (inside | (column < 0)).unsqueeze(0)


class StaticRows(Cache):
    """As ``KVCache``, for capturing: a tensor says where rows go, and the shape is always the same.

    Args:
        keys, values: of every layer, ``[1, G, C, D]``.
        positions: ``[1, C]`` of the keys, where layers have a window.
        index: ``[N]`` long, where the new rows go.
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
        """Keys before the new ones, as far as shapes are concerned."""
        return self._seen - self._index.shape[0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new rows; the keys and values that the pass is about."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys.index_copy_(2, self._index, key_states.to(keys.dtype))
        values.index_copy_(2, self._index, value_states.to(values.dtype))
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def record_positions(self, positions: Tensor) -> Tensor:
        """Note the new rows' positions; those of all keys."""
        assert self._positions is not None
        self._positions.index_copy_(1, self._index, positions)
        return self._positions[:, : self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As ``length``."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As ``KVCache``."""
        return self._seen, 0


Body = Callable[[StaticRows, Tensor], Outputs]
"""Cache and ``[1, N, T]`` mask -> what a pass puts out."""


def step_of(keys: int, least: int = STEP) -> int:
    """Keys between one graph and the next, around so many of them."""
    return max(least, 1 << max(0, keys.bit_length() - 6))


def floor_of(keys: int, least: int = STEP) -> int:
    """The earlier keys of the graph that serves so many. (All steps are powers of two.)"""
    step = step_of(keys, least)
    return keys // step * step


def size_for(rows: int) -> int | None:
    """N for n rows; 0 for none; None where there is no graph as large."""
    if rows == 0:
        return 0
    return next((size for size in SIZES if rows <= size), None)


class GraphRows:
    """The decoder blocks of a backbone and what follows them.

    Args:
        backbone: its weights are read where they are now; move it before.
        head: ``[N, H]`` hidden states -> ``[N, V]`` logits.
        name: of the pass, for the user.
        announce: takes one line for the user, if there can be no graphs.
        recorder: captures.
        step: as of ``GraphStorage``.
        taps: layers whose hidden states are put out too.

    Attributes:
        storage: where caches come from.
        spare: cache rows that a pass needs beyond those of its sequence: none.
    """

    spare = 0

    def __init__(
        self,
        backbone: Backbone,
        head: Callable[[Tensor], Tensor],
        name: str,
        announce: Announce,
        recorder: Recorder,
        *,
        step: int = STEP,
        taps: Sequence[int] = (),
    ) -> None:
        self.storage = GraphStorage(backbone, Attempts(name, recorder, announce), step)
        self._parts = backbone, head, name, announce, recorder
        self._step = step
        self._backbone = backbone
        self._head = head
        self._taps = tuple(taps)
        self._tapped: dict[tuple[int, ...], Self] = {}
        self._inputs: dict[tuple[int, int], _Inputs] = {}

    def tapped(self, layers: Sequence[int]) -> Self:
        """Other graphs, with caches of their own, which put out the hidden states of layers too;
        the same every time."""
        if (key := tuple(layers)) not in self._tapped:
            self._tapped[key] = type(self)(*self._parts, step=self._step, taps=key)
        return self._tapped[key]

    @property
    def held(self) -> int:
        """Bytes of the last cache, which the next one takes over."""
        return self.storage.held

    def capacity(self, rows: int) -> int:
        """Rows of the cache that a sequence of so many gets."""
        return self.storage.capacity(rows)

    def prepare(self, most: int) -> None:
        """Nothing yet: a graph is captured when a pass of its shape first comes."""

    def takes(self, new: int, cache: KVCache) -> bool:
        """Whether so many rows are replayed: not for prompts, nor over a cache from elsewhere."""
        return new <= SIZES[-1] and self.storage.takes(cache)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Outputs:
        """Append n rows to the cache.

        Args:
            tokens: ``[n]`` long.
            positions: ``[n]`` long.
            mask: ``[n, W]`` bool, who sees whom among the last W keys, W >= n, all that is before
                being seen; None: every row sees every key.
            cache: the one that ``storage`` has given last, with something in it.

        Returns:
            Hidden states ``[n, H]``, logits ``[n, V]`` and, with taps, ``[n, L, H]``.
        """
        new = tokens.shape[0]
        size, older = size_for(new), size_for(0 if mask is None else mask.shape[1] - new)
        if size is None or older is None or cache.length + size > cache.capacity:
            return self._plainly(tokens, positions, mask, cache)
        inputs = self._inputs.get((size, older))
        if inputs is None:
            inputs = self._inputs[size, older] = _Inputs.empty(size, older, tokens.device)
        inputs.tokens[:new].copy_(tokens)
        inputs.positions[:new].copy_(positions)
        inputs.tail.fill(mask, new, cache.length)

        def body(rows: StaticRows, seen: Tensor) -> Outputs:
            tokens, positions = inputs.tokens[None], inputs.positions[None]
            return self._run(tokens=tokens, positions=positions, mask=seen, cache=rows)

        outputs = self.storage.replay((size, older), inputs.tail, cache, body)
        if outputs is None:
            return self._plainly(tokens, positions, mask, cache)
        cache.advance(new)
        return tuple(output[:new].clone() for output in outputs)

    def _plainly(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Outputs:
        """The pass as the modules do it."""
        seen = None if mask is None else mask[None]
        return self._run(tokens=tokens[None], positions=positions[None], mask=seen, cache=cache)

    def _run(self, **rows: Any) -> Outputs:
        """``[1, N]`` rows through the modules; what ``__call__`` returns, N of them."""
        hidden, *taps = self._backbone.tapped(self._taps, **rows)
        return hidden[0], self._head(hidden[0]), *(states[0] for states in taps)


class _Inputs(NamedTuple):
    """What a pass of N rows reads, at addresses that stay.

    Attributes:
        tokens: ``[N]`` long.
        positions: ``[N]`` long.
        tail: where they go and whom they see.
    """

    tokens: Tensor
    positions: Tensor
    tail: Tail

    @classmethod
    def empty(cls, size: int, older: int, device: torch.device) -> _Inputs:
        """For N rows after O older ones."""
        with torch.inference_mode(False):
            numbers = torch.zeros(2, size, dtype=torch.long, device=device)
            return cls(numbers[0], numbers[1], Tail.empty(size, older, device))
