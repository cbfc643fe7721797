"""The forward passes that Falcon's drafting is made of: the modules as they are, and compiled.

Shapes: D sequences (the root's one, or F branches), L rows of a sequence, O older rows before them,
R = O + D·L rows of a pass, N of them asked for predictions, W columns of a mask, S keys, k block,
M layers of the LSTM, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from falcon_lab.compiling.ahead import Announce, Compiled, PassCompiler, compile_ahead
from falcon_lab.compiling.lstm import Unrolled
from falcon_lab.compiling.rows import LEAST, SPARE, Keys, Slices, size_for
from falcon_lab.drafters.fusing import Fuse, State
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.kv_cache import KVCache

if TYPE_CHECKING:
    from falcon_lab.drafters.falcon import FalconDrafter

LONGEST = 16
"""Rows of a sequence, and sequences, up to which a pass is compiled: its recurrence is written out
row after row."""


class AtOnce(NamedTuple):
    """What a pass from tokens to logits gives.

    Attributes:
        hidden: ``[N, H]``.
        logits: ``[N, V]``.
        fused: ``[D, L, H]``, the rows as they went into the decoder blocks.
        state: after each sequence's last row.
    """

    hidden: Tensor
    logits: Tensor
    fused: Tensor
    state: State


class Passes:
    """The modules as they are.

    Attributes:
        spare: cache rows that a pass needs beyond those of its sequence.
        at_once: what takes tokens to logits in one pass, if there is such a thing.
    """

    spare = 0
    at_once: CompiledPass | None = None

    def __init__(self, fuse: Fuse, backbone: Backbone) -> None:
        self._fuse = fuse
        self._backbone = backbone

    def fuse(self, rows: Tensor, state: State | None) -> tuple[Tensor, State | None]:
        """``[D, L, 2H]`` joined rows, going on from a state -> ``[D, L, H]`` and the next state."""
        fused: tuple[Tensor, State | None] = self._fuse(rows, state)
        return fused

    def blocks(
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Append rows to the cache.

        Args:
            rows: ``[1, R, H]``, fused.
            positions: ``[1, R]`` long.
            mask: ``[1, R, W]`` bool, who sees whom among the last W keys; None: all see all.
            cache: earlier rows.

        Returns:
            ``[1, R, H]``.
        """
        hidden: Tensor = self._backbone(
            embeddings=rows, positions=positions, mask=mask, cache=cache
        )
        return hidden


class CompiledPasses(Passes):
    """A round's passes compiled, each from tokens to logits; prompts go through the modules.

    Args:
        drafter: with an LSTM, and without queries of its own.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    spare = SPARE

    def __init__(
        self, drafter: FalconDrafter, announce: Announce, compiler: PassCompiler = compile_ahead
    ) -> None:
        super().__init__(drafter.fuse, drafter.backbone)
        if drafter.config.fuse == "lstm" and drafter.offsets is None:
            self.at_once = CompiledPass(drafter, announce, compiler)


class CompiledPass:
    """A pass from tokens to logits.

    Args:
        drafter: its weights are copied into the compiled pass.
        announce: takes one line for the user at a time.
        compiler: makes the passes.
    """

    def __init__(self, drafter: FalconDrafter, announce: Announce, compiler: PassCompiler) -> None:
        self._traced = Traced(drafter)
        self._block = drafter.block
        self._keys = Keys(drafter.backbone)
        self._announce = announce
        self._compiler = compiler
        self._passes: dict[tuple[int, ...], Compiled] = {}
        self._all = torch.ones(4 * LONGEST, 4 * LONGEST, dtype=torch.bool)
        self._index = torch.arange(4 * LONGEST)

    def takes(self, tokens: Tensor, older: int, start: int) -> bool:
        """Whether there is a pass for ``[D, L]`` tokens after so many older rows, the first of
        them going to row ``start`` of the cache."""
        sequences, rows = tokens.shape
        few = max(sequences, rows) <= LONGEST and older + sequences * rows <= 3 * LONGEST
        return few and start >= LEAST

    def __call__(
        self,
        tokens: Tensor,
        features: Tensor,
        state: State,
        older: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KVCache,
        asked: int,
    ) -> AtOnce:
        """Fuse rows, append them and older ones to the cache, and predict from the last of them.

        Args:
            tokens: ``[D, L]`` long.
            features: ``[D, L, H]``.
            state: of the LSTM before each sequence.
            older: ``[O, H]`` rows fused before, computed once more ahead of the others.
            positions: ``[R]`` long.
            mask: ``[R, W]`` bool, who sees whom among the last W keys; None: all see all.
            cache: earlier rows.
            asked: N, the last rows of R.
        """
        count, length = tokens.shape
        wide, before = size_for(count), older.shape[0]
        # Branches stand one below the other, so padding may only follow the last of them.
        long = length if length <= self._block else size_for(length)
        hidden, cell = state
        if (wide, long) != (count, length):
            more = (0, long - length, 0, wide - count)
            tokens = functional.pad(tokens, more)
            features = functional.pad(features, (0, 0, *more))
            hidden, cell = (functional.pad(part, (0, 0, 0, wide - count)) for part in state)
        new = before + count * length
        size = before + wide * long
        mask = self._all[:new, :new] if mask is None else mask
        if size > new:
            positions, mask = _padded(positions, mask, size - new)
        keys, values = cache.tensors()
        last, rows = self._index[length - 1 : length], self._index[new - asked : new]
        small = [tokens, features, hidden, cell, older, positions, mask, last, rows]
        inputs = [*small, self._keys.columns(cache.length + size), *keys, *values]
        key = (wide, long, before, asked, torch.get_num_threads())
        run = self._passes.get(key)
        if run is None:
            run = self._passes[key] = self._compile(small, key)
        found, logits, fused, hidden, cell = run(inputs)
        cache.advance(new)
        if wide > count:
            hidden, cell = hidden[:, :count], cell[:, :count]
        return AtOnce(found, logits, fused[:count, :length], (hidden, cell))

    def _compile(self, small: list[Tensor], key: tuple[int, ...]) -> Compiled:
        wide, long, before, asked, _ = key
        example = [tensor.clone() for tensor in small]
        mask = example[6]
        if mask.shape[1] < 2:  # a width of one would be taken for a constant
            example[6] = torch.ones(mask.shape[0], 2, dtype=torch.bool)
        keys, values, columns, shapes = self._keys.example(before + wide * long)
        width = torch.export.Dim("width", min=1, max=2**16)
        dynamic: list[Any] = [{} for _ in example]
        dynamic[6] = {1: width}
        return self._compiler(
            self._traced,
            (*example, columns, keys, values),
            (*dynamic, shapes.columns, shapes.rows, shapes.rows),
            name=f"drafter-{wide}-by-{long}-after-{before}-rows-for-{asked}",
            announce=self._announce,
        )


class Traced(nn.Module):
    """What is traced."""

    def __init__(self, drafter: FalconDrafter) -> None:
        super().__init__()
        self.lstm = Unrolled(drafter.fuse.mix)
        self.backbone = drafter.backbone
        self._join = drafter.join
        self._host: Any = drafter.host

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        hidden: Tensor,
        cell: Tensor,
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
        joined = self._join(tokens, features)
        fused, hidden, cell = self.lstm(joined.to(hidden.dtype), hidden, cell, last)
        rows = torch.cat((older, fused.flatten(0, 1)))
        found = self.backbone(
            embeddings=rows[None],
            positions=positions[None],
            mask=mask[None],
            cache=Slices(keys, values, columns, rows.shape[0]),
        )[0].index_select(0, asked)
        return found, self._host.head(found.to(joined.dtype)), fused, hidden, cell


def _padded(positions: Tensor, mask: Tensor, more: int) -> tuple[Tensor, Tensor]:
    """Rows of nothing behind the others: they see what is before, and nobody sees them."""
    new, width = mask.shape
    wider = mask.new_zeros(new + more, width + more)
    wider[:new, :width] = mask
    wider.diagonal(width - new)[new:] = True
    return functional.pad(positions, (0, more)), wider
