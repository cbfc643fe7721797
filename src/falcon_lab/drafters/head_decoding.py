"""A head's drafting side: the cache, the states of its fuse and the passes of a round.

The caching rule: a committed row's K/V are those of the pass that computed it last, when it saw
everything up to the end of its block then. The first pass of a round computes the new rows
and as many older ones as make the last k rows one block; nothing else is ever computed again.

A long prompt comes in parts, and how many rows are still to come with each. So the blocks of the
whole are known from the first part on, and every part's whole blocks are computed when it comes:
the same numbers as in one pass over everything.

Shapes: F frontier blocks, P provisional blocks, k block, L committed rows, W rows of a window,
E extra rows of the first pass, S keys, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import NewRows, Passes, WholePass
from falcon_lab.interfaces import DraftOutput, Frontier, Observation
from falcon_lab.model.kv_cache import GrowingCache, RowCache

CAPACITY = 512  # rows of a cache when nobody has said how long the sequence will get
PIECE = 2048  # rows of one pass over a prompt, so that no mask is larger than [1, PIECE, S]


@dataclass(frozen=True, slots=True)
class Pass:
    """What the next pass continues from.

    Attributes:
        features: ``[F, k, H]`` predicted features.
        state: of the fuse after each block's last row.
        visible: ``[F, P]`` bool, the provisional blocks on the way to each block, itself too.
        depth: passes since the root.
        chain: whether every block so far was the only one of its pass.
    """

    features: Tensor
    state: State | None
    visible: Tensor
    depth: int
    chain: bool


@dataclass(frozen=True, slots=True)
class Begun:
    """A sequence at the first pass of a round.

    Attributes:
        features: ``[1, k, H]`` predicted features.
        length: L.
        state: of the fuse after row L - 1.
        recent: ``[1, up to k, H]``, the newest rows, fused.
    """

    features: Tensor
    length: int
    state: State | None
    recent: Tensor


class Decoding:
    """One sequence being drafted for.

    Args:
        drafter: whose weights draft.
        passes: what they compute with.
        cache: where its rows go; None makes a cache that grows.
    """

    def __init__(
        self, drafter: HeadLayers, passes: Passes, cache: GrowingCache | RowCache | None = None
    ) -> None:
        self._drafter = drafter
        self._passes = passes
        self._block = drafter.block
        self._aligned = drafter.aligned
        self._pending: list[Observation] = []
        self._length = 0  # L, fused
        self._computed = 0  # of them, those whose keys and values are in the cache
        self._state: State | None = None  # after row L - 1
        self._recent: Tensor | None = None  # [1, R, H]: the newest rows, fused: k, or more to do
        self._last: Pass | None = None
        self._room = CAPACITY
        self._cache = cache
        self._index = torch.empty(0, dtype=torch.long)  # 0, 1, 2, …
        self._positions = self._index  # the same, within the host's positions
        self._nothing = torch.empty(1, 0, dtype=torch.bool)
        self._aligned_table = torch.empty(0, 0, dtype=torch.bool)

    def expect(self, rows: int) -> None:
        """Make the cache that large from the start."""
        self._room = rows

    def observe(self, observation: Observation) -> None:
        """Keep new rows until the next round computes them, or compute a prompt's part at once."""
        self._pending.append(observation)
        self._last = None
        if observation.remaining:
            with torch.no_grad():
                self._fuse_pending(observation.remaining)

    def draft(self, frontier: Frontier) -> DraftOutput:
        """Expand the frontier."""
        if (found := self._at_once(frontier)) is not None:
            return found
        hidden = self._root() if frontier.tokens.shape[1] == 0 else self._blocks(frontier)
        return DraftOutput(self._drafter.logits(hidden), hidden, all_proposed=True)

    def begin(self) -> Begun:
        """Compute the first pass of a round, for somebody who goes on with the sequence."""
        hidden = self._root()
        assert self._recent is not None
        return Begun(hidden, self._length, self._state, self._recent)

    # --- passes from tokens to logits -------------------------------------------------------

    def _at_once(self, frontier: Frontier) -> DraftOutput | None:
        """Expand the frontier in one compiled pass, if there is one for it."""
        at_once, cache = self._passes.at_once, self._cache
        if at_once is None or not isinstance(cache, GrowingCache):
            return None
        if frontier.tokens.shape[1]:
            return self._blocks_at_once(at_once, cache, frontier)
        return self._root_at_once(at_once, cache)

    def _root_at_once(self, at_once: WholePass, cache: GrowingCache) -> DraftOutput | None:
        block, recent, state = self._block, self._recent, self._state
        if len(self._pending) != 1 or recent is None:
            return None
        tokens = self._pending[0].tokens
        length = self._length + tokens.shape[0]
        start = self._window_start(length)
        older = self._length - start
        ready = self._computed == self._length and block <= length
        if not ready or older > recent.shape[1] or not at_once.takes(tokens[None], older, start):
            return None
        features = self._read(self._pending.pop())
        positions, mask = self._window_layout(start, length, 0)
        cache.truncate(start)
        rows = NewRows(
            tokens[None],
            features[None],
            state,
            recent[0, recent.shape[1] - older :],
            positions[0],
            None if mask is None else mask[0],
            block,
        )
        found = at_once(rows, cache)
        self._length = self._computed = length
        self._state = found.state
        self._recent = torch.cat([recent, found.fused], dim=1)[:, -block:]
        hidden = found.hidden.unsqueeze(0)
        self._last = Pass(hidden, self._state, self._nothing, depth=0, chain=True)
        return DraftOutput(found.logits.unsqueeze(0), hidden, all_proposed=True)

    def _blocks_at_once(
        self, at_once: WholePass, cache: GrowingCache, frontier: Frontier
    ) -> DraftOutput | None:
        last, block, recent = self._last, self._block, self._recent
        if last is None or recent is None or not at_once.takes(frontier.tokens, 0, self._length):
            return None
        features, state = last.features, last.state
        count, chain = frontier.tokens.shape[0], last.chain and frontier.tokens.shape[0] == 1
        visible, mask = last.visible, None
        if not chain:
            features = features[frontier.parents]
            state = branch(state, frontier.parents)
            own = torch.eye(count, dtype=torch.bool, device=features.device)
            visible = torch.cat([visible[frontier.parents], own], dim=1)
            mask = self._block_mask(visible, chain)
        else:
            visible = visible.new_ones(1, visible.shape[1] + 1)
        first = self._length + last.visible.shape[1] * block
        self._reserve(first + count * block)
        begin = self._length + last.depth * block
        cache.truncate(first)
        rows = NewRows(
            frontier.tokens,
            features,
            state,
            recent[0, :0],
            self._block_positions(begin, count)[0],
            None if mask is None else mask[0],
            count * block,
        )
        found = at_once(rows, cache)
        hidden = found.hidden.view(count, block, -1)
        self._last = Pass(hidden, found.state, visible, last.depth + 1, chain)
        return DraftOutput(found.logits.view(count, block, -1), hidden, all_proposed=True)

    # --- the first pass of a round ----------------------------------------------------------

    def _root(self) -> Tensor:
        """Compute the window and whatever asks for predictions; ``[1, k, H]``."""
        self._fuse_pending(0)
        if self._recent is None:
            raise RuntimeError("draft() needs observed positions: call observe() first")
        window = self._window(self._window_start(self._length), self._length)
        extra = self._extra_rows(window)
        rows = window if extra is None else torch.cat([window, extra], dim=1)
        hidden = self._run_window(rows, self._length, rows.shape[1] - window.shape[1])
        self._computed = self._length
        self._recent = self._recent[:, -self._block :]
        if extra is not None and self._drafter.offsets is None:
            # Missing rows come before the first one, yet were computed behind the last.
            hidden = hidden.roll(extra.shape[1], dims=1)
        hidden = hidden[:, -self._block :]
        none = torch.empty(1, 0, dtype=torch.bool, device=hidden.device)
        self._last = Pass(hidden, self._state, none, depth=0, chain=True)
        return hidden

    def _fuse_pending(self, remaining: int) -> None:
        """Fuse the new rows, and compute all but what the round's first pass is to compute.

        Args:
            remaining: rows that are still to come before that.
        """
        if not self._pending:
            return
        tokens = torch.cat([taken.tokens for taken in self._pending])
        features = torch.cat([self._read(taken) for taken in self._pending])
        self._pending.clear()
        for start in range(0, tokens.shape[0], PIECE):
            self._fuse(tokens[start : start + PIECE], features[start : start + PIECE])
            left = tokens.shape[0] - start - PIECE
            self._compute_whole_blocks(self._length + remaining + max(0, left))

    def _read(self, observation: Observation) -> Tensor:
        return self._drafter.read(observation.features, observation.taps)

    def _fuse(self, tokens: Tensor, features: Tensor) -> None:
        """Append ``[n]`` tokens and ``[n, H]`` features to the fused rows."""
        joined = self._drafter.join(tokens, features).unsqueeze(0)
        fused, self._state = self._passes.fuse(joined, self._state)
        recent = self._recent
        self._recent = fused if recent is None else torch.cat([recent, fused], dim=1)
        self._length += tokens.shape[0]

    def _compute_whole_blocks(self, total: int) -> None:
        """Compute the rows that see no further than what is there.

        Args:
            total: rows at the next round, by whose end aligned blocks are counted.
        """
        if total == self._length:
            return  # the rest is the round's own
        block = self._block if self._drafter.offsets is None else 1
        stop = min(self._length, total - self._block)  # the last k rows are asked for predictions
        stop -= (stop - total if self._aligned else stop) % block
        start = self._window_start(total)
        if stop <= start:
            return
        self._run_window(self._window(start, stop), stop, 0)
        self._computed = stop
        assert self._recent is not None
        self._recent = self._recent[:, -max(self._block, self._length - stop) :]

    def _window(self, start: int, stop: int) -> Tensor:
        """Fused rows ``[1, stop - start, H]``."""
        assert self._recent is not None
        before = self._length - self._recent.shape[1]
        return self._recent[:, start - before : stop - before]

    def _window_start(self, total: int) -> int:
        """The first row to compute, or to compute again, in a sequence of ``total``."""
        before = self._computed
        if self._drafter.offsets is not None:
            return before  # causal rows never change
        if not self._aligned:
            before -= before % self._block  # a block that was cut short is whole now
        return max(0, min(before, total - self._block))

    def _extra_rows(self, window: Tensor) -> Tensor | None:
        """``[1, E, H]``: the queries, or zeros for rows missing at the start of a sequence."""
        if self._drafter.offsets is not None:
            assert self._recent is not None
            return self._recent[:, -1:] + self._drafter.offsets
        missing = self._block - self._length
        return window.new_zeros(1, missing, window.shape[-1]) if missing > 0 else None

    def _run_window(self, rows: Tensor, stop: int, extra: int) -> Tensor:
        """Compute the rows before ``stop``, and extra ones that nobody is to see."""
        start = stop + extra - rows.shape[1]
        positions, mask = self._window_layout(start, stop, extra)
        hidden = self._run(rows, positions, mask, start)
        assert self._cache is not None
        self._cache.truncate(stop)
        return hidden

    def _window_layout(self, start: int, stop: int, extra: int) -> tuple[Tensor, Tensor | None]:
        """Positions ``[1, W + E]`` and mask ``[1, W + E, W + E]``, None where all see all."""
        block = self._block
        self._reserve(stop + extra)
        positions, index = self._positions[start:stop], self._index[start:stop]
        causal = self._drafter.offsets is not None
        if extra == 0 and self._aligned and not causal:
            mask = self._aligned_mask(stop - start) if stop - start > block else None
            return positions.unsqueeze(0), mask
        if causal:
            horizon = index
        elif self._aligned:
            horizon = (stop - 1) - (stop - 1 - index).div(block, rounding_mode="floor") * block
        else:
            end = index.div(block, rounding_mode="floor") * block + block - 1
            horizon = end.clamp_max(stop - 1)
        if extra:
            newest = stop - 1 if causal else 0
            positions = torch.cat([positions, self._positions[newest].expand(extra)])
            horizon = torch.cat([horizon, self._index[stop + extra - 1].expand(extra)])
        mask = self._index[start : stop + extra] <= horizon.unsqueeze(1)
        return positions.unsqueeze(0), mask.unsqueeze(0)

    def _aligned_mask(self, rows: int) -> Tensor:
        """``[1, rows, rows]``, cut out of one table: aligned blocks are counted from the end."""
        known = self._aligned_table
        if known.shape[0] < rows:
            behind = self._index[:rows].flip(0)  # rows from here to the last one
            horizon = behind.div(self._block, rounding_mode="floor") * self._block
            known = self._aligned_table = behind >= horizon.unsqueeze(1)
        return known[-rows:, -rows:].unsqueeze(0)

    # --- later passes -----------------------------------------------------------------------

    def _blocks(self, frontier: Frontier) -> Tensor:
        """Continue F branches by a block each; ``[F, k, H]``."""
        last, drafter, block = self._last, self._drafter, self._block
        if last is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        joined = drafter.join(frontier.tokens, last.features[frontier.parents])
        fused, state = self._passes.fuse(joined, branch(last.state, frontier.parents))
        count = fused.shape[0]
        own = torch.eye(count, dtype=torch.bool, device=fused.device)
        visible = torch.cat([last.visible[frontier.parents], own], dim=1)
        chain = last.chain and count == 1
        rows = fused
        if drafter.offsets is not None:
            rows = torch.cat([fused, fused[:, -1:] + drafter.offsets])  # contexts, then queries
        first = self._length + last.visible.shape[1] * block
        cache = self._reserve(first + rows.shape[0] * block)
        begin = self._length + last.depth * block
        hidden = self._run(
            rows.reshape(1, -1, rows.shape[-1]),
            self._block_positions(begin, count),
            self._block_mask(visible, chain),
            first,
        )
        cache.truncate(first + count * block)  # queries are asked, never seen
        hidden = hidden[0, -count * block :].view(count, block, -1)
        self._last = Pass(hidden, state, visible, last.depth + 1, chain)
        return hidden

    def _block_positions(self, begin: int, count: int) -> Tensor:
        positions = self._positions[begin : begin + self._block]
        if self._drafter.offsets is None and count == 1:
            return positions.unsqueeze(0)
        if self._drafter.offsets is None:
            return positions.repeat(count).unsqueeze(0)
        newest = positions[-1:].expand(self._block)
        return torch.cat([positions.repeat(count), newest.repeat(count)]).unsqueeze(0)

    def _block_mask(self, visible: Tensor, chain: bool) -> Tensor | None:
        """``[1, rows, P·k]`` (and the queries): the ancestors' blocks and the block itself.

        What is committed is seen by all.
        """
        block, count = self._block, visible.shape[0]
        if chain and self._drafter.offsets is None:
            return None
        tree = visible.repeat_interleave(block, 0).repeat_interleave(block, 1)
        if self._drafter.offsets is None:
            return tree.unsqueeze(0)
        causal = tree.new_ones(block, block).tril().repeat(count, count)
        older, newer = tree.split([tree.shape[1] - count * block, count * block], dim=1)
        context = torch.cat([older, newer & causal, torch.zeros_like(newer)], dim=1)
        query = torch.cat([tree, newer], dim=1)
        return torch.cat([context, query]).unsqueeze(0)

    # --- the cache --------------------------------------------------------------------------

    def _reserve(self, rows: int) -> GrowingCache | RowCache:
        """Make room for that many rows, in the cache and in the tables of positions."""
        cache = self._cache
        most = self._drafter.host.max_positions
        rows += self._passes.spare
        if cache is None:
            room = max(self._room, rows)
            cache = self._cache = self._passes.new_cache(room, most)
        if cache.reserve(rows) or not self._index.shape[0]:
            assert self._recent is not None
            self._index = torch.arange(cache.capacity, device=self._recent.device)
            self._positions = self._index.clamp_max(most - 1)
            self._nothing = self._nothing.to(self._index.device)
        return cache

    def _run(self, rows: Tensor, positions: Tensor, mask: Tensor | None, first: int) -> Tensor:
        """One backbone call; its rows lie in the cache from ``first`` on."""
        assert self._cache is not None
        self._cache.truncate(first)
        return self._passes.blocks(rows, positions, mask, self._cache)


def branch(state: State | None, parents: Tensor) -> State | None:
    """The states of some of the sequences."""
    return None if state is None else (state[0][:, parents], state[1][:, parents])
