"""A head's drafting for several sequences at once: what ``head_decoding.py`` does for one.

A pass is one call of the LSTM, the decoder blocks and the LM head for all rows that draft in it,
padded to the widest and masked. Only a sequence's first pass, which computes its prompt, is a call
of its own: it goes the way of a single sequence, into its row of the cache.

Shapes: B rows, R rows of a pass, m new positions, L committed rows of a sequence, W rows of a
window, E extra rows, T rows that a pass computes, F frontier blocks, P provisional blocks,
Q blocks that may be seen, k block, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_batch_layout import Blocks, Windows, block_mask, pick
from falcon_lab.drafters.head_batch_rows import BatchPass, Known, Prompt
from falcon_lab.drafters.head_decoding import Decoding, branch
from falcon_lab.protocols import DraftOutput, Frontier, Observation
from falcon_lab.targets.sending import send

if TYPE_CHECKING:
    from falcon_lab.drafters.feature_head import FeatureHead


class HeadSequences:
    """Up to B sequences being drafted for.

    Args:
        drafter: whose weights draft.
        rows: B.
        positions: of the longest sequence.
        room: columns that such a sequence and a round's blocks take.
    """

    def __init__(self, drafter: FeatureHead, rows: int, positions: int, room: int) -> None:
        self._drafter = drafter
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
        self._sequences[row] = Known(Prompt(cache, Decoding(self._drafter, cache)))

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
