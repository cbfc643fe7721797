"""The passes of a language model that drafts, from tokens to logits: as they are, or compiled.

Shapes: n new rows, N rows asked for logits, W columns of a mask, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from falcon_lab.interfaces import Announce, PassCompiler, Recorder
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.compiled import compile_ahead
from falcon_lab.model.graphs import GraphRows
from falcon_lab.model.kv_cache import GrowingCache
from falcon_lab.model.passes import FastRows, fast_rows


class ModelPasses:
    """A model with a cache of its own, of one sequence.

    A copy for a row of a batch goes through the modules.

    Args:
        backbone: from tokens to hidden states.
        head: ``[N, H]`` hidden states -> ``[N, V]`` logits.
        most: positions that the model was made for.
    """

    def __init__(self, backbone: Backbone, head: Callable[[Tensor], Tensor], most: int) -> None:
        self._backbone, self._head, self._most = backbone, head, most
        self._fast: FastRows | None = None

    def compiled(
        self,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
        recorder: Recorder | None = None,
    ) -> Self:
        """The same model where it is, through compiled passes, or through graphs on a GPU.

        Prompts go through the modules.

        Args:
            announce: takes one line for the user at a time.
            compiler: makes the passes on a CPU.
            recorder: captures graphs; None: on a GPU alone.
        """
        other = copy.copy(self)
        parts = self._backbone, self._head, "drafter", next(self._backbone.parameters()).device
        other._fast = fast_rows(*parts, announce, compiler, recorder, older=True)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        backbone, head = copy.deepcopy((self._backbone, self._head), memo)
        return type(self)(backbone, head, self._most)

    @property
    def is_compiled(self) -> bool:
        """Whether they are."""
        return self._fast is not None

    def prepare(self, longest: int) -> None:
        """Compile the passes over up to so many rows now, if they are to be compiled at all."""
        if self._fast is not None:
            self._fast.prepare(longest)

    def kv_bytes(self, rows: int) -> int:
        """Memory of the cache that ``new_cache`` gives for so many rows."""
        return self._backbone.layout.bytes(self._capacity(rows))

    @property
    def kv_allocated(self) -> int:
        """Memory that is taken already, and that the next cache takes over."""
        return 0 if self._fast is None else self._fast.held

    def new_cache(self, rows: int) -> GrowingCache:
        """An empty cache for so many rows; with graphs, the one before is of no use any more."""
        if isinstance(self._fast, GraphRows):
            return self._fast.storage.new_cache(rows, self._most)
        layers, layout = self._backbone.config.num_hidden_layers, self._backbone.layout
        return GrowingCache(layers, self._capacity(rows), layout, self._most)

    def _capacity(self, rows: int) -> int:
        return rows if self._fast is None else self._fast.capacity(rows)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: GrowingCache,
        *,
        asked: int,
        causal: bool = False,
    ) -> Tensor:
        """Append rows to the cache, which grows when it must.

        Args:
            tokens: ``[n]`` long.
            positions: ``[n]`` long.
            mask: ``[n, W]`` bool, who sees whom among the last W keys, W >= n, all that is before
                being seen; None: every row sees every key.
            cache: earlier rows.
            asked: N, the last rows of n.
            causal: ``mask`` is a text's own.

        Returns:
            Logits, ``[N, V]``.
        """
        new, fast = tokens.shape[0], self._fast
        cache.reserve(cache.length + new + (0 if fast is None else fast.spare))
        if fast is not None and fast.takes(new, cache):
            logits: Tensor = fast(tokens, positions, mask, cache)[1]
            return logits[-asked:]
        hidden = self._backbone(
            tokens=tokens[None],
            positions=positions[None],
            mask=None if mask is None else mask[None],
            cache=cache,
            causal=causal,
        )
        return self._head(hidden[0, -asked:])
