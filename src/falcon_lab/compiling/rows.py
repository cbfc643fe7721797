"""Decoder blocks compiled for a fixed number of new rows, over the cache of the plain pass.

Shapes: n new rows, N rows of the compiled pass (n and padding), W columns of a mask, S keys (cached
rows and the N), C capacity, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from falcon_lab.compiling.ahead import Announce, Compiled, PassCompiler, compile_ahead
from falcon_lab.errors import FalconLabError
from falcon_lab.targets.backbone import Backbone
from falcon_lab.targets.kv_cache import KVCache

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows that a pass is compiled for; a few more rows of nothing cost less than another pass to
compile."""

SPARE = 16
"""Cache rows beyond what is needed, for the padding of a pass (the widest gap between sizes)."""


def size_for(rows: int) -> int:
    """N for n rows.

    Raises:
        FalconLabError: that many rows are read by the plain pass alone.
    """
    for size in SIZES:
        if rows <= size:
            return size
    raise FalconLabError(f"{rows} rows are more than a compiled pass reads ({SIZES[-1]})")


class CompiledRows:
    """The decoder blocks of a backbone and what follows them.

    Args:
        backbone: its weights are copied into the compiled pass.
        head: ``[N, H]`` hidden states -> ``[N, V]`` logits; without it there are none.
        name: of the pass, for the user.
        announce: takes one line for the user at a time.
        compiler: makes a pass of what is traced.
    """

    def __init__(
        self,
        backbone: Backbone,
        head: Callable[[Tensor], Tensor] | None,
        name: str,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
    ) -> None:
        self._compiler = compiler
        self._traced = Rows(backbone, head)
        self._name = name
        self._announce = announce
        self._passes: dict[tuple[int, int, torch.dtype], Compiled] = {}
        self._all = torch.ones(SIZES[-1], SIZES[-1], dtype=torch.bool)
        self._columns = torch.empty(0, dtype=torch.long)

    def takes(self, new: int, cache: KVCache) -> bool:
        """Whether there is a pass for so many rows: not for prompts."""
        return cache.length > 0 and new <= SIZES[-1]

    def __call__(
        self, rows: Tensor, positions: Tensor, mask: Tensor | None, cache: KVCache
    ) -> tuple[Tensor, ...]:
        """Append n rows to the cache.

        Args:
            rows: ``[n]`` long tokens, or ``[n, H]`` embeddings.
            positions: ``[n]`` long.
            mask: ``[n, W]`` bool, who sees whom among the last W keys, W >= n, all that is before
                being seen; None: every row sees every key.
            cache: of one sequence, with ``SPARE`` rows to spare and something in it.

        Returns:
            Hidden states ``[n, H]``, and logits ``[n, V]`` if there is a head.
        """
        new, size = rows.shape[0], size_for(rows.shape[0])
        mask = self._all[:new, :new] if mask is None else mask
        if size > new:
            rows, positions, mask = _padded(rows, positions, mask, size - new)
        keys, values = cache.tensors()
        stop = cache.length + size
        if self._columns.shape[0] < stop:
            self._columns = torch.arange(2 * stop)
        inputs = [rows, positions, mask, self._columns[:stop], *keys, *values]
        key = (size, torch.get_num_threads(), rows.dtype)
        run = self._passes.get(key)
        if run is None:
            run = self._passes[key] = self._compile(inputs, len(keys))
        outputs = run(inputs)
        if cache.positions is not None:
            cache.record_positions(inputs[1][None, :new])
        cache.advance(new)
        return tuple(output[:new] for output in outputs)

    def _compile(self, inputs: list[Tensor], layers: int) -> Compiled:
        """A pass for inputs like these, whatever the length of the context and of the cache."""
        rows, positions, mask = (tensor.clone() for tensor in inputs[:3])
        size = rows.shape[0]
        example = inputs[4].shape[2]
        seen = torch.export.Dim("seen", min=size + 1, max=2**20)
        capacity = torch.export.Dim("capacity", min=SIZES[-1] + SPARE, max=2**21)
        width: dict[int, Any] = {} if size == 1 else {1: torch.export.Dim("width", min=2)}
        keys, values = (
            [tensor.new_zeros(tensor.shape) for tensor in part]
            for part in (inputs[4 : 4 + layers], inputs[4 + layers :])
        )
        columns = torch.arange(min(example - 1, size + 37))
        rows_of = [{2: capacity}] * layers
        return self._compiler(
            self._traced,
            (rows, positions, mask, columns, keys, values),
            ({}, {}, width, {0: seen}, rows_of, rows_of),
            name=f"{self._name}-{size}-rows",
            announce=self._announce,
        )


class Rows(nn.Module):
    """What is traced: a backbone whose cache is made of the inputs."""

    def __init__(self, backbone: Backbone, head: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        mask: Tensor,
        columns: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """``columns``: ``[S]``, 0, 1, 2, …: its length tells how many keys there are."""
        cache = _Slices(keys, values, columns, rows.shape[0])
        given = {"tokens": rows[None]} if rows.dim() == 1 else {"embeddings": rows[None]}
        hidden = self.backbone(positions=positions[None], mask=mask[None], cache=cache, **given)[0]
        return (hidden,) if self.head is None else (hidden, self.head(hidden))


class _Slices(Cache):
    """As ``KVCache``, for tracing: rows go where the shapes of the inputs say."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], columns: Tensor, new: int) -> None:
        super().__init__(layers=[])
        self._keys, self._values = keys, values
        self._columns = columns
        self._new = new

    @property
    def length(self) -> int:
        return self._columns.shape[0] - self._new

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values, stop = self._keys[layer_idx], self._values[layer_idx], self.length + self._new
        keys[:, :, self.length : stop] = key_states
        values[:, :, self.length : stop] = value_states
        return keys[:, :, :stop], values[:, :, :stop]

    def record_positions(self, positions: Tensor) -> Tensor:
        return torch.cat((self._columns[None, : self.length], positions), dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.length + query_length, 0


def _padded(
    rows: Tensor, positions: Tensor, mask: Tensor, more: int
) -> tuple[Tensor, Tensor, Tensor]:
    """More rows, which see themselves and what is before, and which nobody sees."""
    new, width = mask.shape
    wider = mask.new_zeros(new + more, width + more)
    wider[:new, :width] = mask
    wider.diagonal(width - new)[new:] = True
    return (
        torch.cat((rows, rows.new_zeros(more, *rows.shape[1:]))),
        torch.cat((positions, positions.new_zeros(more))),
        wider,
    )
