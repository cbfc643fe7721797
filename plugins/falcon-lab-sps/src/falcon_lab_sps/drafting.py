"""A text that the small model drafts for: its cache, and the passes of a round.

A round's first pass reads what was committed since the last one. Later passes append a token for
every expanded node, which attends to the committed ones, its ancestors and itself. All that is
provisional is dropped when the next round begins, and what was accepted of it is read again along
with the new token: one pass either way, and a token's numbers never depend on how it was drafted.

Shapes: F frontier blocks, L committed tokens, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from falcon_lab.drafters.provisional import ProvisionalTokens
from falcon_lab.interfaces import Frontier, LayerPlan
from falcon_lab.model.kv_cache import KVCache
from falcon_lab.model.masks import causal_mask
from falcon_lab.model.passes import ForwardPass, NewPositions
from falcon_lab_sps.small_model import SmallModel

CAPACITY = 512
"""Positions of a cache where the length of the text is unknown."""

FEW = 64
"""Tokens up to which a pass computes the logits of all; a prompt needs those of its last one."""

PIECE = 2048
"""Tokens of one pass over a prompt, so that no mask is larger than ``[1, PIECE, S]``."""


class Way(NamedTuple):
    """How tokens go through the model.

    Attributes:
        run: of a few tokens, a ``TokensForward`` of the model.
        plan: of its layers, which prompts follow, too.
    """

    run: ForwardPass
    plan: LayerPlan


class Drafting:
    """One text.

    Args:
        model: what drafts.
        committed: the way of committed tokens.
        expanded: the way of the nodes that later passes of a round expand.
        first: position of the first token, 0 or 1.
    """

    def __init__(self, model: SmallModel, committed: Way, expanded: Way, first: int) -> None:
        self._model = model
        self._committed, self._expanded = committed, expanded
        self._first = first
        self._room = CAPACITY
        self._cache: KVCache | None = None
        self._pending: list[Tensor] = []
        self._known = 0  # tokens that were observed
        self._length = 0  # L, of them those in the cache
        self._tokens: ProvisionalTokens | None = None  # of the round

    def expect(self, positions: int) -> None:
        """Make the cache that large from the start."""
        self._room = positions

    def observe(self, tokens: Tensor, remaining: int) -> None:
        """Store ``[n]`` committed tokens until the next round, or read a prompt's part at once."""
        self._pending.append(tokens)
        self._known += tokens.shape[0]
        if remaining and self._fits(self._known - 1):
            self._read()

    def root(self) -> Tensor | None:
        """Return logits after the newest token, ``[1, 1, V]``.

        None when the text is longer than the draft model's positions.
        """
        if not self._fits(self._known - 1):
            return None
        logits = self._read()
        self._tokens = ProvisionalTokens(0, logits.device)  # the root is committed
        return logits[None]

    def blocks(self, frontier: Frontier) -> Tensor | None:
        """Return logits after F nodes, ``[F, 1, V]``; None beyond the model's positions."""
        if self._tokens is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        if not self._fits(self._length + self._tokens.depth):
            return None
        position = self._first + self._length + self._tokens.depth
        tokens, mask = frontier.tokens[:, 0], self._tokens.expand(frontier)
        positions = torch.full_like(tokens, position)
        way = self._expanded
        return self._append(tokens, positions, mask, way, asked=len(tokens))[:, None]

    def _fits(self, row: int) -> bool:
        """Return whether the model has a position for a token."""
        return self._first + row < self._model.max_positions

    def _read(self) -> Tensor:
        """Read what was observed; ``[1, V]`` after the newest token."""
        tokens, way = self._unread()
        if self._cache is not None:
            self._cache.truncate(self._length)
        for begin in range(0, tokens.shape[0], PIECE):
            part = tokens[begin : begin + PIECE]
            new, start = part.shape[0], self._first + self._length
            positions = torch.arange(start, start + new, device=part.device)
            mask = causal_mask(new, 0, part.device)[0] if new > 1 else None
            logits = self._append(part, positions, mask, way, asked=1, causal=new > 1)
            self._length += new
        return logits

    def _unread(self) -> tuple[Tensor, Way]:
        """Take the committed tokens ``[n]`` behind the first L, and the way that they go."""
        tokens = torch.cat(self._pending)
        self._pending.clear()
        return tokens, self._committed

    def _append(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        way: Way,
        *,
        asked: int,
        causal: bool = False,
    ) -> Tensor:
        """Append ``[n]`` tokens to the cache; ``[asked, V]`` after the last of them."""
        new, known = tokens.shape[0], self._model.known(tokens)
        if self._cache is None:
            room, most = max(self._room, new), self._model.max_positions
            self._cache = self._committed.run.new_cache(room, most)
        self._committed.run.reserve(self._cache, self._cache.length + new)
        if new > FEW:
            hidden = self._model.backbone(
                tokens=known[None],
                positions=positions[None],
                mask=None if mask is None else mask[None],
                cache=self._cache,
                causal=causal,
                plan=way.plan,
            )
            return self._model.logits(hidden[0, -asked:])
        return way.run([known], NewPositions(positions, mask, self._cache))[1][-asked:]
