"""Decoder layers over what the target's features of a text are, with a KV cache of their own.

Committed positions are rows of the cache that stay. Behind them a round's draft tokens may have
rows too, each of which attends to the text, to its ancestors and to itself; they are dropped when
the next round begins.

Shapes: n new rows, F frontier blocks, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from falcon_lab.drafters.provisional import ProvisionalTokens
from falcon_lab.interfaces import Frontier, Outputs
from falcon_lab.model.backbone import Backbone
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.masks import causal_mask
from falcon_lab.model.passes import ForwardPass, Inputs, NewPositions, NewTokens

CAPACITY = 512
"""Positions of a cache where the length of the text is unknown."""

PIECE = 2048
"""Rows of one pass over a prompt, so that no mask is larger than ``[1, PIECE, S]``."""


class RowsForward(NewTokens):
    """Send ``[n, H]`` rows through decoder layers: ``[n, H]``.

    Args:
        backbone: the layers.
        behind: rows that stand behind the text's in the first pass of a round.
    """

    def __init__(self, backbone: Backbone, behind: int) -> None:
        super().__init__(backbone, "drafter-context")
        self.behind = behind

    def forward(self, inputs: Inputs, new: NewPositions | None) -> Outputs:
        """Append the rows to the cache, and return what the layers put out for them."""
        assert new is not None
        positions, mask, cache = new
        hidden = self.backbone(
            embeddings=inputs[0][None],
            positions=positions[None],
            mask=None if mask is None else mask[None],
            cache=cache,
        )
        return (hidden[0],)

    def examples(self, most: int) -> Iterator[Inputs]:
        """Yield the rows of rounds that leave one to ``most`` positions."""
        weight = next(self.backbone.parameters())
        for new in range(1, most + 1):
            yield [weight.new_zeros(new + self.behind, self.backbone.config.hidden_size)]


class FeatureContext:
    """The rows of one text.

    Args:
        run: what they go through, a ``RowsForward``.
        most: positions of the target.
    """

    def __init__(self, run: ForwardPass, most: int) -> None:
        self._pass, self._most = run, most
        self._room = CAPACITY
        self._cache: KVCache | None = None
        self._pending: list[Tensor] = []
        self._length = 0  # rows of the text in the cache
        self._newest: Tensor | None = None  # [1, H], what the layers put out for the last of them
        self._tokens: ProvisionalTokens | None = None  # of the round

    def expect(self, positions: int) -> None:
        """Make the cache that large from the start."""
        self._room = positions

    def observe(self, features: Tensor, remaining: int) -> None:
        """Store ``[n, H]`` until the next round, or read a prompt's part at once."""
        self._pending.append(features)
        if remaining:
            self._read(torch.cat(self._pending))

    def begin(self, behind: Tensor | None = None) -> Tensor:
        """Begin a round: read what is stored and, for the round alone, a row behind it.

        Args:
            behind: ``[1, H]``; None: none.

        Returns:
            ``[1, H]``, what the layers put out for the newest row.
        """
        rows = [*self._pending, *([] if behind is None else [behind])]
        if rows:
            self._read(torch.cat(rows), provisional=behind is not None)
        if self._newest is None:
            raise RuntimeError("draft() needs an observed position: call observe() first")
        self._tokens = ProvisionalTokens(0 if behind is None else 1, self._newest.device)
        return self._newest

    def expand(self, rows: Tensor, frontier: Frontier) -> Tensor:
        """Append a row for each of F draft tokens, ``[F, H]``, and return what is put out."""
        if self._tokens is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        mask = self._tokens.expand(frontier)
        position = min(self._length + self._tokens.depth, self._most - 1)
        positions = torch.full_like(frontier.tokens[:, 0], position)
        return self._append(rows, positions, mask)

    def _read(self, rows: Tensor, *, provisional: bool = False) -> None:
        """Append rows of the text, of which the last may be none of its own."""
        self._pending.clear()
        if self._cache is not None:
            self._cache.truncate(self._length)
        for begin in range(0, rows.shape[0], PIECE):
            part = rows[begin : begin + PIECE]
            new = part.shape[0]
            positions = torch.arange(self._length, self._length + new, device=part.device)
            mask = causal_mask(new, 0, part.device)[0] if new > 1 else None
            self._newest = self._append(part, positions.clamp_max(self._most - 1), mask)[-1:]
            self._length += new
        self._length -= provisional

    def _append(self, rows: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Append ``[n, H]`` to the cache; ``[n, H]``."""
        if self._cache is None:
            self._cache = self._pass.new_cache(max(self._room, rows.shape[0]), 2 * self._most)
        self._pass.reserve(self._cache, self._cache.length + rows.shape[0])
        return self._pass([rows], NewPositions(positions, mask, self._cache))[0]
