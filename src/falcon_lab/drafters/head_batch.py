"""Where the rows of a batched drafting pass come from and go to.

Shapes: R rows of a pass (sequences), L committed rows of a sequence, T rows that a pass computes of
each, F frontier blocks, Q provisional blocks, k block, S columns, H hidden.

What batched drafting knows of its rows between calls.

Shapes: L committed rows of a sequence, F frontier blocks, P provisional blocks, Q blocks that may
be seen, k block, H hidden.

A head's drafting for several sequences at once: what ``head_decoding.py`` does for one.

A pass is one call of the LSTM, the decoder blocks and the LM head for all rows that draft in it,
padded to the widest and masked. Only a sequence's first pass, which computes its prompt, is a call
of its own: it goes the way of a single sequence, into its row of the cache.

Shapes: B rows, R rows of a pass, m new positions, L committed rows of a sequence, W rows of a
window, E extra rows, T rows that a pass computes, F frontier blocks, P provisional blocks,
Q blocks that may be seen, k block, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_decoding import Decoding, branch
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_passes import Passes
from falcon_lab.interfaces import DraftOutput, Frontier, Observation
from falcon_lab.model.kv_cache import RowCache
from falcon_lab.model.masks import send


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the rows of a first pass come from, and what they see.

    A sequence's T rows are its window, then its extra rows, then padding.

    Attributes:
        source: ``[R, T]`` of the known rows and the extra ones behind them.
        positions: ``[R, T]``.
        mask: ``[R, T, S]`` bool.
        newest: ``[R, k]`` of the T: those that predict what comes next.
    """

    source: Tensor
    positions: Tensor
    mask: Tensor
    newest: Tensor

    @classmethod
    def of(
        cls,
        starts: list[int],
        lengths: list[int],
        ends: list[int],
        drafter: HeadLayers,
        known: int,
        device: torch.device,
    ) -> Windows:
        """Lay windows out.

        Args:
            starts: first row of each window.
            lengths: L.
            ends: where each one's newest row ends among its known ones.
            drafter: whose rules hold.
            known: known rows, the padding counted.
            device: of the result.
        """
        block, queries = drafter.block, drafter.offsets is not None
        extras = [block if queries else max(0, block - length) for length in lengths]
        start, length, end, extra = send([starts, lengths, ends, extras], device).unsqueeze(-1)
        window = length - start
        total = max(n - s + e for n, s, e in zip(lengths, starts, extras, strict=True))
        row = torch.arange(total, device=device)
        inside = row < window
        index = start + row
        source = torch.where(inside, end - window + row, known + row - window)
        # Missing rows come before the first one, yet are computed behind the last.
        outside = length - 1 if queries else torch.zeros_like(length)
        horizon = torch.where(inside, _horizon(index, length, drafter), length + extra - 1)
        columns = torch.arange(max(starts) + total, device=device)
        newest = window + extra - block + torch.arange(block, device=device)
        if not queries and max(extras):
            newest = torch.where(extra > 0, (newest + window) % block, newest)
        return cls(
            source.clamp_max(known + block - 1),
            torch.where(inside, index, outside).clamp_max(drafter.host.max_positions - 1),
            columns <= horizon[..., None],
            newest,
        )


def _horizon(index: Tensor, length: Tensor, drafter: HeadLayers) -> Tensor:
    """The last row that each row of a window sees."""
    block = drafter.block
    if drafter.offsets is not None:
        return index
    if drafter.aligned:
        behind = (length - 1 - index).div(block, rounding_mode="floor") * block
        return length - 1 - behind
    end = index.div(block, rounding_mode="floor") * block + block - 1
    return torch.minimum(end, length - 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a pass, row after row or padded to the widest row.

    Attributes:
        counts: F of every row.
        firsts: each row's first block.
        places: of every block in its row.
    """

    counts: list[int]
    firsts: list[int]
    places: list[int]

    @classmethod
    def of(cls, counts: list[int]) -> Blocks:
        """From F of every row."""
        firsts = [sum(counts[:row]) for row in range(len(counts))]
        return cls(counts, firsts, [place for count in counts for place in range(count)])

    @property
    def width(self) -> int:
        """F of the widest row."""
        return max(self.counts)

    def spread(self, values: list[int]) -> list[int]:
        """One value a row -> one a block."""
        return [
            value for value, count in zip(values, self.counts, strict=True) for _ in range(count)
        ]

    def pad(self, blocks: Tensor) -> Tensor:
        """``[ΣF, …]`` -> ``[R, F, …]``; what stands in the padding does not matter."""
        width = self.width
        if min(self.counts) < width:
            index = [
                first + min(place, count - 1)
                for first, count in zip(self.firsts, self.counts, strict=True)
                for place in range(width)
            ]
            blocks = blocks[send(index, blocks.device)]
        return blocks.unflatten(0, (-1, width))

    def unpad(self, blocks: Tensor) -> Tensor:
        """``[R, F, …]`` -> ``[ΣF, …]``."""
        width, flat = self.width, blocks.flatten(0, 1)
        if min(self.counts) == width:
            return flat
        index = [
            row * width + place for row, count in enumerate(self.counts) for place in range(count)
        ]
        return flat[send(index, blocks.device)]


def block_mask(
    visible: Tensor, lengths: list[int], starts: list[int], block: int, *, queries: bool
) -> Tensor:
    """Who sees whom in a later pass: the committed rows, the blocks on the way, the block itself.

    Args:
        visible: ``[R, F, Q]`` bool, the provisional blocks that each block sees, itself too.
        lengths: L.
        starts: the first new column of each row, behind the blocks of the passes before.
        block: k.
        queries: the blocks are contexts, causal in themselves; k queries of each come behind all
            of them and see its context and one another.

    Returns:
        ``[R, F·k, S]`` bool, with queries ``[R, 2·F·k, S]``.
    """
    _, width, seen = visible.shape
    device, new = visible.device, width * block
    columns = torch.arange(max(starts) + (2 * new if queries else new), device=device)
    behind = columns - send(lengths, device)[:, None]  # [R, S]; below 0: committed
    number = behind.div(block, rounding_mode="floor").clamp(0, seen - 1)
    sees = visible.gather(2, number[:, None].expand(-1, width, -1))
    sees = sees & (behind < seen * block)[:, None] | (behind < 0)[:, None]
    sees = sees[:, :, None].expand(-1, -1, block, -1)  # [R, F, k, S]
    if not queries:
        return sees.flatten(1, 2)
    place = torch.arange(new, device=device).view(width, block)
    own = send(starts, device)[:, None, None] + place  # [R, F, k] columns
    context = sees & (columns <= own[..., None])
    begin = (own[:, :, :1] + new)[..., None]  # column of a block's first query
    query = sees | (columns >= begin) & (columns < begin + block)
    return torch.cat([context.flatten(1, 2), query.flatten(1, 2)], dim=1)


def pick(rows: Tensor, index: Tensor) -> Tensor:
    """``[R, n, H]`` rows by ``[R, T]`` -> ``[R, T, H]``."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))


@dataclass
class Prompt:
    """A sequence that has not been drafted for yet.

    Attributes:
        cache: its row.
        decoding: takes it in.
    """

    cache: RowCache
    decoding: Decoding


@dataclass
class Known:
    """What the host knows of a row.

    Attributes:
        prompt: until its first pass.
        length: L.
        pending: positions that the next round computes.
        provisional: P.
    """

    prompt: Prompt | None = None
    length: int = 0
    pending: list[Observation] = field(default_factory=list)
    provisional: int = 0


@dataclass(frozen=True, slots=True)
class BatchPass:
    """What the next pass continues from; the blocks of all rows stand one after the other.

    Attributes:
        first: row -> its first block.
        features: ``[ΣF, k, H]`` predicted features.
        state: LSTM state after each block's last row.
        visible: ``[ΣF, Q]`` bool, the provisional blocks of its row that each block sees.
        depth: passes since the root.
    """

    first: dict[int, int]
    features: Tensor
    state: State | None
    visible: Tensor
    depth: int


class HeadSequences:
    """Up to B sequences being drafted for.

    Args:
        drafter: whose weights draft.
        rows: B.
        positions: of the longest sequence.
        room: columns that such a sequence and a round's blocks take.
    """

    def __init__(self, drafter: HeadLayers, rows: int, positions: int, room: int) -> None:
        self._drafter = drafter
        self._passes = Passes(drafter.fuse, drafter.backbone)
        self._block = drafter.block
        self._widest = room - positions  # rows of a pass that fit behind any sequence
        self._sequences = [Known() for _ in range(rows)]
        self._cache = drafter.backbone.new_batch_cache(rows, room)
        self._state: State | None = None  # [layers, B, H] each, after row L - 1
        self._recent: Tensor | None = None  # [B, k, H]: the newest rows, fused; zeros before them
        self._last: BatchPass | None = None

    @property
    def nbytes(self) -> int:
        """Memory of the decoder blocks' keys and values so far."""
        return self._cache.nbytes

    def reset(self, row: int, first: Tensor) -> None:
        """Start a sequence. (Its first token alone makes no row.)"""
        cache = self._cache.open(row)
        self._sequences[row] = Known(Prompt(cache, Decoding(self._drafter, self._passes, cache)))

    def observe(self, row: int, observation: Observation) -> None:
        """Keep new positions until the next round computes them, or a prompt's part at once."""
        known = self._sequences[row]
        if known.prompt is None:
            known.pending.append(observation)
        else:
            known.prompt.decoding.observe(observation)

    def move(self, source: int, goal: int) -> None:
        """The sequence of row ``source`` goes to row ``goal``."""
        moved = self._sequences[source]
        self._sequences[goal], self._sequences[source] = moved, Known()
        if moved.prompt is not None:
            moved.prompt.cache.move(goal)
            return
        self._cache.copy_row(source, goal, moved.length)
        for part in self._state or ():
            part[:, goal] = part[:, source]
        if self._recent is not None:
            self._recent[goal] = self._recent[source]

    @torch.no_grad()
    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Expand the frontiers of some rows, all at the same pass of their rounds."""
        rows = list(frontiers)
        if frontiers[rows[0]].tokens.shape[1] == 0:
            hidden = self._roots(rows)
            counts = [1] * len(rows)
        else:
            hidden = self._blocks(rows, list(frontiers.values()))
            counts = [frontier.tokens.shape[0] for frontier in frontiers.values()]
        logits = self._drafter.logits(hidden).split(counts)
        return {
            row: DraftOutput(of_row, features, all_proposed=True)
            for row, of_row, features in zip(rows, logits, hidden.split(counts), strict=True)
        }

    # --- the first pass of a round ----------------------------------------------------------

    def _roots(self, rows: list[int]) -> Tensor:
        """The last k rows of each sequence; ``[R, k, H]`` in the order of ``rows``."""
        groups = self._grouped(rows)
        found = [row for group in groups for row in group]
        hidden = torch.cat([self._root(group) for group in groups])
        if found != rows:
            hidden = hidden[send([found.index(row) for row in rows], hidden.device)]
        self._last = BatchPass(
            first={row: place for place, row in enumerate(rows)},
            features=hidden,
            state=branch(self._state, send(rows, hidden.device)),
            visible=torch.empty(len(rows), 0, dtype=torch.bool, device=hidden.device),
            depth=0,
        )
        return hidden

    def _grouped(self, rows: list[int]) -> list[list[int]]:
        """Rows with as much to compute as a round leaves go together, the others one by one."""

        def much(row: int) -> bool:
            known = self._sequences[row]
            length = known.length + sum(one.tokens.shape[0] for one in known.pending)
            window = length - self._start(known.length, length)
            extra = self._block if self._drafter.offsets is not None else self._block - length
            return known.prompt is not None or window + max(0, extra) > self._widest

        alone = [[row] for row in rows if much(row)]
        together = [row for row in rows if not much(row)]
        return [together, *alone] if together else alone

    def _root(self, rows: list[int]) -> Tensor:
        prompt = self._sequences[rows[0]].prompt
        return self._windows(rows) if prompt is None else self._first(rows[0], prompt)

    def _first(self, row: int, prompt: Prompt) -> Tensor:
        """A sequence's first pass, ``[1, k, H]``; from then on it is one of many."""
        begun = prompt.decoding.begin()
        self._sequences[row] = Known(length=begun.length)
        place = send([row], begun.recent.device)
        self._keep_state(place, begun.state)
        recent = self._memory(begun.recent)[row]
        known = begun.recent.shape[1]
        recent[: self._block - known] = 0
        recent[self._block - known :] = begun.recent[0]
        return begun.features

    def _windows(self, rows: list[int]) -> Tensor:
        """Compute each row's window and whatever asks for predictions; ``[R, k, H]``."""
        sequences = [self._sequences[row] for row in rows]
        before = [sequence.length for sequence in sequences]
        known = self._take_pending(rows)  # [R, k + m, H], each row's newest at k + its own m
        lengths = [sequence.length for sequence in sequences]
        starts = [self._start(old, length) for old, length in zip(before, lengths, strict=True)]
        ends = [self._block + length - old for old, length in zip(before, lengths, strict=True)]
        layout = Windows.of(starts, lengths, ends, self._drafter, known.shape[1], known.device)
        fused = torch.cat([known, self._extra_rows(rows, known)], dim=1)
        hidden = self._run(pick(fused, layout.source), layout.positions, layout.mask, rows, starts)
        return pick(hidden, layout.newest)

    def _take_pending(self, rows: list[int]) -> Tensor:
        """Fuse new positions behind each row's newest k; ``[R, k + m, H]``, padded behind."""
        drafter, taken = self._drafter, [self._sequences[row] for row in rows]
        if not all(sequence.pending for sequence in taken):
            raise RuntimeError("draft() needs observed positions: call observe() first")
        tokens = [torch.cat([one.tokens for one in s.pending]) for s in taken]
        features = [
            torch.cat([drafter.read(one.features, one.taps) for one in s.pending]) for s in taken
        ]
        joined = drafter.join(
            pad_sequence(tokens, batch_first=True), pad_sequence(features, batch_first=True)
        )
        index = send(rows, joined.device)
        new = [len(of_row) for of_row in tokens]
        fused, state = drafter.fuse.padded(joined, new, branch(self._state, index))
        recent = self._memory(fused)
        known = torch.cat([recent[index], fused], dim=1)
        last = send(new, known.device)[:, None]
        recent[index] = pick(known, last + torch.arange(self._block, device=known.device))
        self._keep_state(index, state)
        for sequence, count in zip(taken, new, strict=True):
            sequence.length += count
            sequence.pending, sequence.provisional = [], 0
        return known

    def _memory(self, fused: Tensor) -> Tensor:
        if self._recent is None:
            shape = (len(self._sequences), self._block, fused.shape[-1])
            self._recent = fused.new_zeros(shape)
        return self._recent

    def _keep_state(self, rows: Tensor, state: State | None) -> None:
        if state is None:
            return
        if self._state is None:
            layers, _, hidden = state[0].shape
            empty = state[0].new_zeros(layers, len(self._sequences), hidden)
            self._state = empty, empty.clone()
        for whole, part in zip(self._state, state, strict=True):
            whole[:, rows] = part

    def _start(self, before: int, length: int) -> int:
        """First row of the window of a sequence that had ``before`` rows; as for one sequence."""
        if self._drafter.offsets is not None:
            return before
        if not self._drafter.aligned:
            before -= before % self._block
        return max(0, min(before, length - self._block))

    def _extra_rows(self, rows: list[int], known: Tensor) -> Tensor:
        """``[R, k, H]``: the queries, or zeros for rows missing at the start of a sequence."""
        if self._drafter.offsets is None:
            return known.new_zeros(len(rows), self._block, known.shape[-1])
        assert self._recent is not None
        newest = self._recent[send(rows, known.device), -1:]
        return newest + self._drafter.offsets

    # --- later passes -----------------------------------------------------------------------

    def _blocks(self, rows: list[int], frontiers: list[Frontier]) -> Tensor:
        """Continue the branches of every row by a block each; ``[ΣF, k, H]``."""
        last, drafter, block = self._last, self._drafter, self._block
        if last is None:
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        layout = Blocks.of([frontier.tokens.shape[0] for frontier in frontiers])
        device = last.features.device
        offsets = [last.first[row] for row in rows]
        parents = torch.cat([frontier.parents for frontier in frontiers])
        parents = parents + send(layout.spread(offsets), device)
        tokens = torch.cat([frontier.tokens for frontier in frontiers])
        fused, state = drafter.fuse(
            drafter.join(tokens, last.features[parents]), branch(last.state, parents)
        )
        sequences = [self._sequences[row] for row in rows]
        visible = self._visible(last.visible[parents], layout, sequences)
        asking = layout.pad(fused)
        if drafter.offsets is not None:  # contexts, then queries
            asking = torch.cat([asking, layout.pad(fused[:, -1:] + drafter.offsets)], dim=1)
        starts = [sequence.length + sequence.provisional * block for sequence in sequences]
        begins = [sequence.length + last.depth * block for sequence in sequences]
        hidden = self._run(
            asking.flatten(1, 2),
            self._block_positions(begins, layout.width, device),
            block_mask(
                layout.pad(visible),
                [sequence.length for sequence in sequences],
                starts,
                block,
                queries=drafter.offsets is not None,
            ),
            rows,
            starts,
        )
        own = hidden[:, -layout.width * block :].unflatten(1, (layout.width, block))
        hidden = layout.unpad(own)
        for sequence, count in zip(sequences, layout.counts, strict=True):
            sequence.provisional += count
        self._last = BatchPass(
            dict(zip(rows, layout.firsts, strict=True)), hidden, state, visible, last.depth + 1
        )
        return hidden

    def _visible(self, before: Tensor, layout: Blocks, sequences: Sequence[Known]) -> Tensor:
        """``[ΣF, Q]``: what a block's parent sees, and itself."""
        own = layout.spread([sequence.provisional for sequence in sequences])
        own = [base + place for base, place in zip(own, layout.places, strict=True)]
        visible = before.new_zeros(before.shape[0], max(max(own) + 1, before.shape[1]))
        visible[:, : before.shape[1]] = before
        return visible.scatter_(1, send(own, before.device)[:, None], True)

    def _block_positions(self, begins: list[int], width: int, device: torch.device) -> Tensor:
        """``[R, T]``: every block of a pass is as deep as the others of its row."""
        places = torch.arange(self._block, device=device)
        positions = send(begins, device)[:, None] + places
        parts = [positions.repeat(1, width)]
        if self._drafter.offsets is not None:
            parts.append(positions[:, -1:].expand(-1, width * self._block))
        return torch.cat(parts, dim=1).clamp_max(self._drafter.host.max_positions - 1)

    # --- the cache --------------------------------------------------------------------------

    def _run(
        self, fused: Tensor, positions: Tensor, mask: Tensor, rows: list[int], starts: list[int]
    ) -> Tensor:
        """One backbone call; each row's new columns lie in the cache from its start on."""
        self._cache.begin(rows, starts)
        return self._drafter.backbone(
            embeddings=fused, positions=positions, mask=mask, cache=self._cache
        )
