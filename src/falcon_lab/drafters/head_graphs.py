"""A head's passes as CUDA graphs, each from tokens to logits.

Shapes: D sequences (the root's one, or F branches), L rows of a sequence, O older rows before them,
R = O + D·L rows of a pass, N of them asked for predictions, W columns of a mask, C channels of a
fused row, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import state_of
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import NewRows, Passes, PassOutput, feature_dtype
from falcon_lab.interfaces import Announce, Outputs, Recorder
from falcon_lab.model.graphs import SIZES, STEP, GraphStorage, StaticRows, Tail, size_for
from falcon_lab.model.kv_cache import GrowingCache, KVCache
from falcon_lab.model.recording import Attempts


class GraphPasses(Passes):
    """A round's passes as graphs; prompts go through the modules.

    Args:
        drafter: without queries of its own, where its weights are to stay.
        announce: takes one line for the user, if there can be no graphs.
        recorder: captures.
        step: as of ``GraphStorage``.
    """

    def __init__(
        self, drafter: HeadLayers, announce: Announce, recorder: Recorder, *, step: int = STEP
    ) -> None:
        super().__init__(drafter)
        attempts = Attempts("drafter", recorder, announce)
        self._storage = GraphStorage(drafter.backbone, attempts, step)
        self.fast = GraphPass(drafter, self._storage)

    def capacity(self, rows: int) -> int:
        """As ``Passes``."""
        return self._storage.capacity(rows)

    @property
    def held(self) -> int:
        """As ``Passes``."""
        return self._storage.held

    def new_cache(self, rows: int, most: int) -> GrowingCache:
        """As ``Passes``; the cache before is of no use any more."""
        return self._storage.new_cache(rows, most)


class GraphPass:
    """A pass from tokens to logits, as ``CompiledPass`` does it.

    Rows are not padded: an LSTM would have to take every one of them after the other, and reads
    its weights anew for each.

    Args:
        drafter: without queries of its own.
        storage: where its caches come from.
    """

    def __init__(self, drafter: HeadLayers, storage: GraphStorage) -> None:
        self._drafter = drafter
        self._storage = storage
        self._dtype = feature_dtype(drafter)
        self._inputs: dict[tuple[int, ...], tuple[_Inputs, Tail]] = {}

    def takes(self, rows: NewRows, cache: KVCache) -> bool:
        """As ``FastPass``."""
        usual = rows.tokens.shape[1] > 0 and rows.older.shape[0] < self._drafter.block
        return usual and cache.length > 0 and rows.positions.shape[0] <= SIZES[-1]

    def __call__(self, rows: NewRows, cache: KVCache) -> PassOutput:
        """As ``FastPass``."""
        tokens, features, state, older, positions, mask, asked = rows
        given = _Inputs(tokens, features.to(self._dtype), older, positions, state or ())
        outputs = self._replayed(given, mask, cache, asked)
        if outputs is None:
            outputs = self._pass(given, None if mask is None else mask[None], cache, asked)
        else:
            cache.advance(positions.shape[0])
            outputs = tuple(output.clone() for output in outputs)
        found, logits, fused, *after = outputs
        return PassOutput(found, logits, fused, state_of(after))

    def _replayed(
        self, given: _Inputs, mask: Tensor | None, cache: KVCache, asked: int
    ) -> Outputs | None:
        """The graph's own tensors; None where there is none for such a pass."""
        new = given.positions.shape[0]
        before = size_for(0 if mask is None else mask.shape[1] - new)
        fits = cache.length + new <= cache.capacity
        if before is None or not fits or not self._storage.takes(cache):
            return None
        key = (*given.tokens.shape, given.older.shape[0], before, asked)
        if key not in self._inputs:
            self._inputs[key] = given.blank(), Tail.empty(new, before, given.tokens.device)
        inputs, tail = self._inputs[key]
        inputs.take(given)
        tail.fill(mask, new, cache.length)

        def body(rows: StaticRows, seen: Tensor) -> Outputs:
            return self._pass(inputs, seen, rows, asked)

        return self._storage.replay(key, tail, cache, body)

    def _pass(self, given: _Inputs, mask: Tensor | None, cache: Any, asked: int) -> Outputs:
        """As the modules do it: ``PassOutput``, flat."""
        drafter = self._drafter
        joined = drafter.join(given.tokens, given.features)
        fused, state = drafter.fuse(joined, state_of(given.state))
        rows = torch.cat((given.older, fused.flatten(0, 1)))
        found = drafter.backbone(
            embeddings=rows[None], positions=given.positions[None], mask=mask, cache=cache
        )[0, -asked:]
        return (found, drafter.logits(found), fused, *(state or ()))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a pass reads, beside where its rows go and whom they see.

    Attributes:
        tokens: ``[D, L]`` long.
        features: ``[D, L, H]``.
        older: ``[O, C]``.
        positions: ``[R]`` long.
        state: of the fuse, in as many parts as it has.
    """

    tokens: Tensor
    features: Tensor
    older: Tensor
    positions: Tensor
    state: tuple[Tensor, ...]

    def blank(self) -> _Inputs:
        """The same in shape, at addresses of their own."""
        with torch.inference_mode(False):
            tokens, features, older, positions, *state = [
                torch.zeros(part.shape, dtype=part.dtype, device=part.device) for part in self._all
            ]
            return _Inputs(tokens, features, older, positions, tuple(state))

    def take(self, other: _Inputs) -> None:
        """Copy another one's values in."""
        for buffer, value in zip(self._all, other._all, strict=True):
            buffer.copy_(value)

    @property
    def _all(self) -> tuple[Tensor, ...]:
        return (self.tokens, self.features, self.older, self.positions, *self.state)
