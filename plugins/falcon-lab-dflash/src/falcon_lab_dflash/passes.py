"""A round's pass compiled, or replayed as a CUDA graph: context that is new, and a block.

New rows of context are padded behind. On a CPU the padding goes to rows of the cache that the block
then takes, or that nobody has yet; on a GPU where rows go is read from a tensor.

Shapes: M new rows of context, N the same with padding, C rows of context, S = C + M + k + 1 keys,
T keys of a graph, L tapped layers, k block, G key/value heads, D head size, H hidden, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.interfaces import Announce, Compiled, Outputs, PassCompiler, Recorder, Run
from falcon_lab.model.recording import Attempts
from falcon_lab_dflash.cache import ContextCache

if TYPE_CHECKING:
    from falcon_lab_dflash.drafter import DFlashDrafter

STEP = 256
"""Keys after which the next graph takes over."""

LEAST = 2
"""Rows of context that a compiled pass takes for granted: tracing tells one from several."""


def size_for(new: int) -> int:
    """N for M rows."""
    return new if new == 1 else new + new % 2


class Rounds(ABC):
    """Passes for rounds of few new rows.

    A copy for a row of a batch has none, and goes through the modules.

    Args:
        drafter: whose passes they are.

    Attributes:
        spare: rows behind the context that a pass writes.
    """

    def __init__(self, drafter: DFlashDrafter) -> None:
        self._block = drafter.block
        self._most = drafter.block + 1  # rows that a round leaves
        self.spare = drafter.block + 1 + size_for(self._most)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def takes(self, new: int, cache: ContextCache) -> bool:
        """Whether there is a pass for so many rows behind those of a cache."""
        return 0 < new <= self._most and cache.length >= LEAST

    @abstractmethod
    def __call__(self, taps: Tensor, root: Tensor, cache: ContextCache) -> tuple[Tensor, Tensor]:
        """Take new rows of context in, and draft.

        Args:
            taps: ``[M, L, H]``.
            root: 0-d long.
            cache: earlier rows, to which the new ones are appended.

        Returns:
            Logits ``[k, V]`` and what they are made of, ``[k, H]``.
        """
        ...


class CompiledRounds(Rounds):
    """On a CPU.

    Args:
        drafter: its weights are copied into the compiled passes.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    def __init__(self, drafter: DFlashDrafter, announce: Announce, compiler: PassCompiler) -> None:
        super().__init__(drafter)
        self._traced = Traced(drafter)
        self._announce, self._compiler = announce, compiler
        self._passes: dict[tuple[int, int], Compiled] = {}
        self._columns = torch.empty(0, dtype=torch.long)

    def prepare(self, longest: int) -> None:
        """Compile or load the passes of rounds that leave up to so many rows."""
        for new in range(1, min(longest, self._most) + 1):
            self._pass(size_for(new))

    def __call__(self, taps: Tensor, root: Tensor, cache: ContextCache) -> tuple[Tensor, Tensor]:
        """As ``Rounds``."""
        new, size = taps.shape[0], size_for(taps.shape[0])
        taps = functional.pad(taps, (0, 0, 0, 0, 0, size - new))
        keys, values = cache.reserve(new)
        start, stop = cache.length, cache.length + new + self._block + 1
        columns = self._up_to(stop)
        given = [taps, root, columns[:start], columns, *keys, *values]
        logits, features = self._pass(size)(given)
        cache.length += new
        return logits, features

    def _up_to(self, stop: int) -> Tensor:
        """``[stop]`` long, 0, 1, 2, …: a slice of a table that is made once."""
        if self._columns.shape[0] < stop:
            self._columns = torch.arange(2 * stop)
        return self._columns[:stop]

    def _pass(self, size: int) -> Compiled:
        key = (size, torch.get_num_threads())
        if key not in self._passes:
            context = torch.export.Dim("context", min=LEAST, max=2**20)
            seen = torch.export.Dim("seen", min=LEAST + 1 + self._block + 1, max=2**20)
            room = torch.export.Dim("room", min=LEAST + self.spare, max=2**21)
            layers = len(self._traced.drafter.model.layers)
            rows = [{2: room}] * layers
            self._passes[key] = self._compiler(
                self._traced,
                self._traced.example(size, 4 * self.spare + size),
                ({}, {}, {0: context}, {0: seen}, rows, rows),
                name=f"drafter-{self._block}-after-{size}-rows",
                announce=self._announce,
            )
        return self._passes[key]


class Traced(nn.Module):
    """What is traced."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def example(self, size: int, context: int) -> tuple[Any, ...]:
        """Inputs like those to come, of so many new rows behind so many others."""
        drafter, block = self.drafter, self.drafter.block
        shape, layers = drafter.model.shape, len(drafter.model.layers)
        seen = context + size + block + 1
        sides = [
            [
                torch.zeros(1, shape.groups, 2 * seen, shape.head, dtype=drafter.model.dtype)
                for _ in range(layers)
            ]
            for _ in range(2)
        ]
        taps = torch.zeros(size, len(drafter.taps), shape.hidden, dtype=drafter.host.dtype)
        root = torch.zeros((), dtype=torch.long)
        return taps, root, torch.arange(context), torch.arange(seen), *sides

    def forward(
        self,
        taps: Tensor,
        root: Tensor,
        context: Tensor,
        columns: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """``context``: ``[C]``, ``columns``: ``[S]``, both 0, 1, 2, …."""
        first, new = context.shape[0], taps.shape[0]
        positions = torch.arange(new) + first
        drafter, pairs = self.drafter, list(zip(keys, values, strict=True))
        made = drafter.model.context(taps[None], positions[None])
        for layer, pair in enumerate(pairs):
            for kept, side in zip(pair, made, strict=True):
                kept[:, :, first : first + new] = side[layer]
        stop = columns.shape[0]
        start = stop - drafter.block - 1

        def behind(layer: int, *own: Tensor) -> tuple[Tensor, Tensor]:
            for kept, side in zip(pairs[layer], own, strict=True):
                kept[:, :, start:stop] = side
            kept_keys, kept_values = pairs[layer]
            return kept_keys[:, :, :stop], kept_values[:, :, :stop]

        return drafter.guess(root, columns[start:], behind, None)


class ReplayedRounds(Rounds):
    """On a GPU. One text is drafted for at a time: the cache keeps its memory for the next.

    Args:
        drafter: where its weights are to stay.
        announce: takes one line for the user, if there can be no graphs.
        recorder: captures.
    """

    def __init__(self, drafter: DFlashDrafter, announce: Announce, recorder: Recorder) -> None:
        super().__init__(drafter)
        self._drafter = drafter
        self._attempts = Attempts("drafter", recorder, announce)
        self._inputs: dict[int, _Inputs] = {}
        self._graphs: dict[tuple[int, int], Run] = {}
        self._keys: Tensor | None = None  # of the memory that the graphs were captured over

    def takes(self, new: int, cache: ContextCache) -> bool:
        """As ``Rounds``."""
        return super().takes(new, cache) and not self._attempts.failed

    def __call__(self, taps: Tensor, root: Tensor, cache: ContextCache) -> tuple[Tensor, Tensor]:
        """As ``Rounds``."""
        new, size = taps.shape[0], size_for(taps.shape[0])
        keys, values = cache.reserve(new)
        if keys[0] is not self._keys:
            self.forget()
            self._keys = keys[0]
        if size not in self._inputs:
            self._inputs[size] = _Inputs.like(taps, size, self._block)
        inputs = self._inputs[size]
        inputs.fill(taps, root, cache.length)
        reach = cache.length + new + self._block + 1
        seen = min(-(-reach // STEP) * STEP, keys[0].shape[2])

        def body() -> Outputs:
            return self._body(inputs, keys, values, seen)

        run = self._graphs.get((size, seen)) or self._attempts.capture(body)
        if run is None:
            outputs = body()
        else:
            self._graphs[size, seen] = run
            outputs = tuple(output.clone() for output in run())
        cache.length += new
        return outputs[0], outputs[1]

    def forget(self) -> None:
        """Let go of the cache's memory, and of the graphs over it."""
        self._graphs.clear()
        self._keys = None

    def _body(
        self, inputs: _Inputs, keys: list[Tensor], values: list[Tensor], seen: int
    ) -> Outputs:
        drafter, pairs = self._drafter, list(zip(keys, values, strict=True))
        made = drafter.model.context(inputs.taps[None], inputs.where[None])
        for layer, pair in enumerate(pairs):
            for kept, side in zip(pair, made, strict=True):
                kept.index_copy_(2, inputs.where, side[layer])

        def behind(layer: int, *own: Tensor) -> tuple[Tensor, Tensor]:
            for kept, side in zip(pairs[layer], own, strict=True):
                kept.index_copy_(2, inputs.block, side)
            kept_keys, kept_values = pairs[layer]
            return kept_keys[:, :, :seen], kept_values[:, :, :seen]

        known = torch.arange(seen, device=inputs.block.device) <= inputs.block[-1:]
        mask = known.expand(1, inputs.block.shape[0], -1)
        return drafter.guess(inputs.root, inputs.block, behind, mask)


class _Inputs(NamedTuple):
    """What a graph reads, at addresses that stay.

    Attributes:
        taps: ``[N, L, H]``.
        root: 0-d long.
        where: ``[N]`` long, rows of the new context; padding goes behind the block.
        block: ``[k + 1]`` long, rows of the block.
        count: ``[N + k + 1]`` long, 0, 1, 2, ….
    """

    taps: Tensor
    root: Tensor
    where: Tensor
    block: Tensor
    count: Tensor

    @classmethod
    def like(cls, taps: Tensor, size: int, block: int) -> _Inputs:
        """For N rows and a block of k."""
        with torch.inference_mode(False):
            count = torch.arange(size + block + 1, device=taps.device)
            rows = taps.new_zeros(size, *taps.shape[1:])
            return cls(rows, count[0].clone(), count[:size].clone(), count[size:].clone(), count)

    def fill(self, taps: Tensor, root: Tensor, start: int) -> None:
        """Take a round's own values in: M rows behind ``start`` others."""
        new, size, rows = taps.shape[0], self.taps.shape[0], self.block.shape[0]
        self.taps[:new].copy_(taps)
        self.root.copy_(root)
        self.where[:new].copy_(self.count[:new] + start)
        self.where[new:].copy_(self.count[: size - new] + (start + new + rows))
        self.block.copy_(self.count[:rows] + (start + new))
