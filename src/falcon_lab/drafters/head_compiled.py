"""A head's drafting passes compiled, each from tokens to logits.

Shapes: D sequences (the root's one, or F branches), L rows of a sequence, O older rows before them,
R = O + D·L rows of a pass, N of them asked for predictions, W columns of a mask, S keys, k block,
C channels of a fused row, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.drafters.fusing import state_of
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import NewRows, Passes, PassOutput, feature_dtype
from falcon_lab.interfaces import Announce, Compiled, PassCompiler
from falcon_lab.model.compiled import (
    LEAST,
    SPARE,
    Keys,
    Slices,
    compile_ahead,
    padded,
    size_for,
)
from falcon_lab.model.kv_cache import KVCache

LONGEST = 16
"""Rows of a sequence, and sequences, up to which a pass is compiled: a recurrence is written out
row after row."""


class CompiledPasses(Passes):
    """A round's passes compiled, each from tokens to logits; prompts go through the modules.

    Args:
        drafter: without queries of its own.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    spare = SPARE

    def __init__(
        self, drafter: HeadLayers, announce: Announce, compiler: PassCompiler = compile_ahead
    ) -> None:
        super().__init__(drafter)
        self.fast = CompiledPass(drafter, announce, compiler)


class CompiledPass:
    """A pass from tokens to logits.

    Args:
        drafter: its weights are copied into the compiled pass.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    def __init__(self, drafter: HeadLayers, announce: Announce, compiler: PassCompiler) -> None:
        self._traced = Traced(drafter)
        self._block = drafter.block
        self._keys = Keys(drafter.backbone)
        self._announce = announce
        self._compiler = compiler
        self._passes: dict[tuple[int, ...], Compiled] = {}
        self._all = torch.ones(4 * LONGEST, 4 * LONGEST, dtype=torch.bool)
        self._index = torch.arange(4 * LONGEST)
        self._dtype = feature_dtype(drafter)

    def prepare(self, longest: int) -> None:
        """Compile or load the passes of rounds in which up to so many rows are new.

        Those of branching passes come when a tree first asks for them.
        """
        lengths = {
            rows if rows <= self._block else size_for(rows) for rows in range(1, longest + 1)
        }
        for rows in sorted(lengths):
            if rows <= LONGEST:
                self._pass((1, rows, max(0, self._block - rows), self._block))

    def takes(self, rows: NewRows, cache: KVCache) -> bool:
        """As ``FastPass``."""
        sequences, length = rows.tokens.shape
        older, size = rows.older.shape[0], rows.positions.shape[0]
        few = 0 < max(sequences, length) <= LONGEST and size <= 3 * LONGEST
        return few and older < self._block and cache.length >= LEAST

    def __call__(self, rows: NewRows, cache: KVCache) -> PassOutput:
        """As ``FastPass``."""
        tokens, features, state, older, positions, mask, asked = rows
        count, length = tokens.shape
        wide, before = size_for(count), older.shape[0]
        # Branches stand one below the other, so padding may only follow the last of them.
        long = length if length <= self._block else size_for(length)
        remembered: tuple[Tensor, ...] = state or ()
        features = features.to(self._dtype)
        if (wide, long) != (count, length):
            more = (0, long - length, 0, wide - count)
            tokens = functional.pad(tokens, more)
            features = functional.pad(features, (0, 0, *more))
            remembered = tuple(functional.pad(part, (0, 0, 0, wide - count)) for part in remembered)
        new = before + count * length
        size = before + wide * long
        mask = self._all[:new, :new] if mask is None else mask
        columns = self._keys.noted(positions, size, cache)
        if size > new:
            positions, mask = padded(positions, mask, size - new)
        keys, values = cache.tensors()
        last, wanted = self._index[length - 1 : length], self._index[new - asked : new]
        small = [tokens, features, *remembered, older, positions, mask, last, wanted]
        inputs = [*small, columns, *keys, *values]
        run = self._pass((wide, long, before, asked))
        found, logits, fused, *after = run(inputs)
        cache.advance(new)
        if wide > count:
            after = [part[:, :count] for part in after]
        return PassOutput(found, logits, fused[:count, :length], state_of(after))

    def _pass(self, shape: tuple[int, int, int, int]) -> Compiled:
        """The pass for D, L, O and N, whatever the context and the width of the mask."""
        key = (*shape, torch.get_num_threads())
        run = self._passes.get(key)
        if run is None:
            run = self._passes[key] = self._compile(*shape)
        return run

    def _compile(self, wide: int, long: int, before: int, asked: int) -> Compiled:
        rows = before + wide * long
        tokens, features, fused, state = self._traced.example(wide, long, self._dtype)
        example = (
            tokens,
            features,
            state,
            fused.new_zeros(before, fused.shape[-1]),
            torch.zeros(rows, dtype=torch.long),
            torch.ones(rows, rows + 1, dtype=torch.bool),  # one would be taken for a constant
            torch.zeros(1, dtype=torch.long),
            torch.zeros(asked, dtype=torch.long),
        )
        keys, values, columns, shapes = self._keys.example(rows)
        width = torch.export.Dim("width", min=1, max=2**16)
        fixed: tuple[Any, ...] = ({}, {}, [{} for _ in state], {}, {}, {1: width}, {}, {})
        return self._compiler(
            self._traced,
            (*example, columns, keys, values),
            (*fixed, shapes.columns, shapes.rows, shapes.rows),
            name=f"drafter-{wide}-by-{long}-after-{before}-rows-for-{asked}",
            announce=self._announce,
        )


class Traced(nn.Module):
    """What is traced."""

    def __init__(self, drafter: HeadLayers) -> None:
        super().__init__()
        self.drafter = drafter

    @torch.no_grad()
    def example(
        self, sequences: int, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Tokens ``[D, L]``, features ``[D, L, H]``, fused rows ``[D, 1, C]`` and a state, like
        those that a pass is about."""
        drafter = self.drafter
        tokens = torch.zeros(sequences, length, dtype=torch.long)
        width = drafter.backbone.config.hidden_size
        features = torch.zeros(sequences, length, width, dtype=dtype)
        fused, state = drafter.fuse(drafter.join(tokens[:, :1], features[:, :1]), None)
        return tokens, features, fused, [part.clone() for part in state or ()]

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        state: list[Tensor],
        older: Tensor,
        positions: Tensor,
        mask: Tensor,
        last: Tensor,
        asked: Tensor,
        columns: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """``columns``: ``[S]``; ``last`` and ``asked``: the rows for the state and the logits."""
        drafter = self.drafter
        joined = drafter.join(tokens, features)
        fused, after = drafter.fuse.until(joined, state_of(state), last)
        rows = torch.cat((older, fused.flatten(0, 1)))
        found = drafter.backbone(
            embeddings=rows[None],
            positions=positions[None],
            mask=mask[None],
            cache=Slices(keys, values, columns, rows.shape[0]),
        )[0].index_select(0, asked)
        return found, drafter.logits(found), fused, *(after or ())
