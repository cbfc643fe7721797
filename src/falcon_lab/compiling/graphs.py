"""Decoder blocks replayed as CUDA graphs for a fixed number of new rows, over a cache that stays.

Shapes: n new rows, N rows of a graph (n and padding), W columns of a mask, L tapped layers,
H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from falcon_lab.compiling.ahead import Announce
from falcon_lab.compiling.graph_cache import SIZES, STEP, GraphStorage, StaticRows, Tail, size_for
from falcon_lab.compiling.recording import Attempts, Outputs, Recorder
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.kv_cache import KVCache
from falcon_lab.targets.taps import tapped_pass


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
        hidden, *taps = tapped_pass(self._backbone, self._taps, **rows)
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
