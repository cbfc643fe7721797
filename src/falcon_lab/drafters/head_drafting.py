"""Draft with a head for one sequence or several: its KV cache, the states of its fuse, its passes.

The caching rule: the keys and values of a committed token are those of the pass that computed it
last, when it attended to everything up to the end of its block then. The first pass of a round
computes the new tokens and as many older ones as make the last k one block; nothing else is ever
computed again.

A long prompt comes in parts, and how many tokens are still to come with each. So the blocks of the
whole are known from the first part on, and every part's whole blocks are computed when it comes:
the same numbers as in one pass over everything.

Sequences share a pass where they have about as much to compute, padded to the longest. Padding and
full masks cost what one sequence need not pay, so a sequence with a pass of its own (the only one,
or one with a prompt to read) goes through ``HeadForward`` with slices in their place.

Shapes: B sequences, R of a pass, L committed tokens of a sequence, F frontier blocks, P cached
blocks of a round, k block, C channels of a fused token, M LSTM layers, H hidden, V vocabulary (the
head's own, where it has one).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_layers import HeadLayers
from falcon_lab.drafters.head_layout import Layout, PaddedBlocks
from falcon_lab.drafters.head_passes import HeadOutput, feature_dtype
from falcon_lab.drafters.head_state import Drafted, Pass, branch, joined_state, split_state
from falcon_lab.interfaces import DraftOutput, Frontier, Observation
from falcon_lab.model.kv_cache import BatchCache, KVCache
from falcon_lab.model.masks import send
from falcon_lab.model.passes import ForwardPass, NewPositions

CAPACITY = 512  # positions of a cache where the length of the sequence is unknown
PIECE = 2048  # tokens of one pass over a prompt, so that no mask is larger than [1, PIECE, S]


class Drafting:
    """Up to B sequences that a head drafts for.

    Args:
        head: whose weights draft.
        run: how the pass of one sequence, a ``HeadForward``, is run.
        count: B.
        cache: of B sequences; None makes one for a single sequence, which grows.
        widest: tokens of a shared pass for which ``cache`` has room behind any sequence.
    """

    def __init__(
        self,
        head: HeadLayers,
        run: ForwardPass,
        count: int = 1,
        cache: BatchCache | None = None,
        widest: int = 0,
    ) -> None:
        self._head, self._pass = head, run
        self._dtype: torch.dtype | None = None  # of features
        self._layout = Layout(head)
        self._block = head.block
        self._sequences = [Drafted() for _ in range(count)]
        self._cache: KVCache | None = cache
        self._widest = widest
        self._room = CAPACITY
        self._last: Pass | None = None

    @property
    def nbytes(self) -> int:
        """Return the memory that keys and values have taken so far."""
        return 0 if self._cache is None else self._cache.nbytes

    def expect(self, positions: int) -> None:
        """Make the cache that large from the start."""
        self._room = positions

    def reset(self, number: int, first: Tensor) -> None:
        """Start a sequence. (Its first token alone makes no input.)"""
        self._sequences[number] = Drafted()

    def move(self, source: int, goal: int) -> None:
        """Move the sequence at place ``source`` to place ``goal``."""
        moved = self._sequences[source]
        self._sequences[goal], self._sequences[source] = moved, Drafted()
        assert isinstance(self._cache, BatchCache)
        self._cache.copy_sequence(source, goal, moved.computed)

    @torch.no_grad()
    def observe(self, number: int, observation: Observation) -> None:
        """Store new positions until the next round computes them, or compute a prompt's part."""
        one = self._sequences[number]
        one.pending.append(observation)
        if self._last is not None:
            self._last.first.pop(number, None)
        if observation.remaining:
            with torch.no_grad():
                self._read(
                    number, *self._taken(number, observation.remaining), observation.remaining
                )

    @torch.no_grad()
    def draft(
        self, frontiers: Mapping[int, Frontier], given: Mapping[int, Tensor] | None = None
    ) -> dict[int, DraftOutput]:
        """Expand the frontiers of some sequences, all at the same pass of their rounds.

        Args:
            frontiers: by sequence.
            given: ``[F, k, H]`` of each, what is joined with the draft tokens of a later pass;
                None: the head's own predictions, in place of the features.
        """
        numbers, chosen = list(frontiers), list(frontiers.values())
        if chosen[0].tokens.shape[1] == 0:
            hidden, logits = self._roots(numbers)
        elif self._last is None or not all(number in self._last.first for number in numbers):
            raise RuntimeError("the first pass of a round expands Frontier.root()")
        elif len(numbers) == 1:
            own = None if given is None else given[numbers[0]]
            hidden, logits = self._branches(numbers[0], chosen[0], self._last, own)
        else:
            own = None if given is None else torch.cat([given[number] for number in numbers])
            hidden, logits = self._shared_branches(numbers, chosen, self._last, own)
        if len(numbers) == 1:
            return {numbers[0]: self._output(logits, hidden)}
        counts = [frontier.parents.shape[0] for frontier in chosen]
        parts = zip(logits.split(counts), hidden.split(counts), strict=True)
        return {number: self._output(*part) for number, part in zip(numbers, parts, strict=True)}

    def _output(self, logits: Tensor, hidden: Tensor) -> DraftOutput:
        words = self._head.draft_vocabulary
        return DraftOutput(logits, hidden, all_proposed=True, vocabulary=words)

    # --- the first pass of a round ------------------------------------------------------------

    def _roots(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Compute all that is pending; ``[R, k, H]`` and ``[R, k, V]``."""
        alone = numbers if len(numbers) == 1 else [n for n in numbers if self._goes_alone(n)]
        shared = [number for number in numbers if number not in alone]
        found = [self._shared_roots(shared)] if shared else []
        found += [self._root(number) for number in alone]
        hidden, logits = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
        order = [*shared, *alone]
        if order != numbers:
            index = send([order.index(number) for number in numbers], hidden.device)
            hidden, logits = hidden[index], logits[index]
        first = {number: place for place, number in enumerate(numbers)}
        self._last = Pass(first, hidden, self._states(numbers), None, depth=0)
        return hidden, logits

    def _goes_alone(self, number: int) -> bool:
        """Return whether there is more to compute than what a round leaves."""
        one = self._sequences[number]
        length = one.length + sum(part.tokens.shape[0] for part in one.pending)
        window = length - self._layout.start(one.computed, length)
        return one.recent is None or window + self._layout.behind(length) > self._widest

    def _root(self, number: int) -> tuple[Tensor, Tensor]:
        """Compute one sequence's window; ``[1, k, H]`` and ``[1, k, V]``."""
        one, layout, block = self._sequences[number], self._layout, self._block
        tokens, features = self._taken(number, 0)
        length = one.length + tokens.shape[0]
        start, behind = layout.start(one.computed, length), layout.behind(length)
        positions, mask = layout.window(start, length, behind, features.device)
        older = one.window(start, one.length)
        state = self._states([number])
        cache = self._begin([number], [start], length + behind)
        inputs = [tokens[None], features[None].to(self._dtype), older, *(state or ())]
        found = HeadOutput.of(self._pass(inputs, NewPositions(positions, mask, cache)))
        one.append(found.fused, found.state)
        one.complete(block)
        hidden, logits = found.hidden[None], found.logits[None]
        if behind and self._head.offsets is None:
            # Missing tokens come before the first one, yet are computed behind the last.
            hidden, logits = hidden.roll(behind, dims=1), logits.roll(behind, dims=1)
        return hidden, logits

    def _taken(self, number: int, remaining: int) -> tuple[Tensor, Tensor]:
        """Take what is pending, and read all of it but the last piece.

        Returns:
            Tokens ``[n]`` and features ``[n, H]``; n is 0 where nothing is pending.
        """
        one, read = self._sequences[number], self._head.read
        parts = [(part.tokens, read(part.features, part.taps)) for part in one.pending]
        one.pending.clear()
        if not parts:
            if one.recent is None:
                raise RuntimeError("draft() needs observed positions: call observe() first")
            nothing = torch.empty(0, dtype=torch.long, device=one.recent.device)
            return nothing, one.recent[0, :0]
        tokens, features = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        while tokens.shape[0] > PIECE:
            left = remaining + tokens.shape[0] - PIECE
            self._read(number, tokens[:PIECE], features[:PIECE], left)
            tokens, features = tokens[PIECE:], features[PIECE:]
        return tokens, features

    def _read(self, number: int, tokens: Tensor, features: Tensor, remaining: int) -> None:
        """Fuse part of a prompt, and compute the blocks that are whole.

        Args:
            number: of the sequence.
            tokens: ``[n]``.
            features: ``[n, H]``.
            remaining: tokens that are still to come before the next round.
        """
        one, head, layout = self._sequences[number], self._head, self._layout
        one.append(*head.fuse(head.join(tokens, features)[None], self._states([number])))
        total = one.length + remaining
        start, stop = layout.start(one.computed, total), layout.whole(one.length, total)
        if stop <= start:
            return
        fused = one.window(start, stop)
        positions, mask = layout.window(start, stop, 0, fused.device)
        head.backbone(
            embeddings=fused[None],
            positions=positions[None],
            mask=None if mask is None else mask[None],
            cache=self._begin([number], [start], stop),
        )
        one.computed = stop
        assert one.recent is not None
        one.recent = one.recent[:, -max(self._block, one.length - stop) :]

    def _shared_roots(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the windows of several sequences; ``[R, k, H]`` and ``[R, k, V]``."""
        head, layout, block = self._head, self._layout, self._block
        chosen = [self._sequences[number] for number in numbers]
        taken = [self._taken(number, 0) for number in numbers]
        tokens, features = [pair[0] for pair in taken], [pair[1] for pair in taken]
        new = [len(of_one) for of_one in tokens]
        joined = head.join(pad_sequence(tokens, True), pad_sequence(features, True))
        fused, state = head.fuse.padded(joined, new, self._states(numbers))
        known = torch.cat([torch.cat([one.newest(block) for one in chosen]), fused], dim=1)
        lengths = [one.length + count for one, count in zip(chosen, new, strict=True)]
        starts = [layout.start(one.computed, n) for one, n in zip(chosen, lengths, strict=True)]
        windows = layout.windows(
            starts, lengths, [block + count for count in new], known.shape[1], known.device
        )
        last = send(new, known.device)[:, None]
        newest = _picked(known, last + torch.arange(block, device=known.device))
        behind = torch.zeros_like(newest) if head.offsets is None else head.queries(newest[:, -1])
        hidden = head.backbone(
            embeddings=_picked(torch.cat([known, behind], dim=1), windows.source),
            positions=windows.positions,
            mask=windows.mask,
            cache=self._begin(numbers, starts, 0),
        )
        states = split_state(state, len(numbers))
        for one, length, recent, own in zip(chosen, lengths, newest.split(1), states, strict=True):
            one.recent, one.state, one.length = recent, own, length
            one.complete(block)
        hidden = _picked(hidden, windows.newest)
        return head.carried(hidden), head.logits(hidden)

    def _states(self, numbers: list[int]) -> State | None:
        """Return the states of the fuse of some sequences, ``[M, R, H]`` each."""
        return joined_state([self._sequences[number].state for number in numbers])

    # --- later passes -------------------------------------------------------------------------

    def _branches(
        self, number: int, frontier: Frontier, last: Pass, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Continue the F branches of one sequence; ``[F, k, H]`` and ``[F, k, V]``."""
        one, block, count = self._sequences[number], self._block, frontier.tokens.shape[0]
        parents, features, state = frontier.parents, last.features, last.state
        if last.first[number]:
            parents = parents + last.first[number]
        if count > 1 or features.shape[0] > 1:
            features, state = features[parents], branch(state, parents)
        if given is not None:
            features = given
        visible = self._visible(one, last, parents)
        first, begin = one.length + one.blocks * block, one.length + last.depth * block
        positions, mask = self._layout.branches(begin, count, visible, features.device)
        older = one.window(one.length, one.length)
        cache = self._begin([number], [first], first + positions.shape[0])
        inputs = [frontier.tokens, features.to(self._dtype), older, *(state or ())]
        found = HeadOutput.of(self._pass(inputs, NewPositions(positions, mask, cache)))
        one.blocks += count
        hidden = found.hidden.view(count, block, -1)
        self._last = Pass({number: 0}, hidden, found.state, visible, last.depth + 1)
        return hidden, found.logits.view(count, block, -1)

    def _visible(self, one: Drafted, last: Pass, parents: Tensor) -> Tensor | None:
        """Return ``[F, P]``: what a branch's parent attends to, and itself; None: everything."""
        count, before = parents.shape[0], last.visible
        if before is None and count == 1 and self._head.offsets is None:
            return None
        own = torch.eye(count, dtype=torch.bool, device=parents.device)
        if before is None:
            return torch.cat([own.new_ones(count, one.blocks), own], dim=1)
        return torch.cat([before[parents, : one.blocks], own], dim=1)

    def _shared_branches(
        self, numbers: list[int], frontiers: list[Frontier], last: Pass, given: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Continue the branches of several sequences; ``[ΣF, k, H]`` and ``[ΣF, k, V]``."""
        head, block, device = self._head, self._block, last.features.device
        padded = PaddedBlocks.of([frontier.tokens.shape[0] for frontier in frontiers])
        chosen = [self._sequences[number] for number in numbers]
        parents = torch.cat([frontier.parents for frontier in frontiers])
        parents = parents + send(padded.spread([last.first[number] for number in numbers]), device)
        features = last.features[parents] if given is None else given
        joined = head.join(torch.cat([frontier.tokens for frontier in frontiers]), features)
        fused, state = head.fuse(joined, branch(last.state, parents))
        embeddings = padded.pad(fused)
        if head.offsets is not None:  # contexts, then queries
            embeddings = torch.cat([embeddings, padded.pad(head.queries(fused[:, -1]))], dim=1)
        visible = self._shared_visible(chosen, last, parents, padded)
        starts = [one.length + one.blocks * block for one in chosen]
        positions, mask = self._layout.blocks(
            padded.pad(visible),
            [one.length for one in chosen],
            starts,
            [one.length + last.depth * block for one in chosen],
        )
        hidden = head.backbone(
            embeddings=embeddings.flatten(1, 2),
            positions=positions,
            mask=mask,
            cache=self._begin(numbers, starts, 0),
        )
        hidden = padded.unpad(
            hidden[:, -padded.width * block :].unflatten(1, (padded.width, block))
        )
        for one, count in zip(chosen, padded.counts, strict=True):
            one.blocks += count
        first, carried = dict(zip(numbers, padded.firsts, strict=True)), head.carried(hidden)
        self._last = Pass(first, carried, state, visible, last.depth + 1)
        return carried, head.logits(hidden)

    @staticmethod
    def _shared_visible(
        chosen: list[Drafted], last: Pass, parents: Tensor, padded: PaddedBlocks
    ) -> Tensor:
        """Return ``[ΣF, P]``, as ``_visible`` does, with P of the sequence that has the most."""
        own = padded.spread([one.blocks for one in chosen])
        own = [base + place for base, place in zip(own, padded.places, strict=True)]
        known = 0 if last.visible is None else last.visible.shape[1]
        shape = parents.shape[0], max(max(own) + 1, known)
        visible = torch.zeros(shape, dtype=torch.bool, device=parents.device)
        if last.visible is not None:
            visible[:, :known] = last.visible[parents]
        return visible.scatter_(1, send(own, parents.device)[:, None], True)

    # --- the cache ----------------------------------------------------------------------------

    def _begin(self, numbers: list[int], starts: list[int], stop: int) -> KVCache:
        """Return the cache, ready for a pass that writes from ``starts`` (alone: to ``stop``)."""
        if self._dtype is None:
            self._dtype = feature_dtype(self._head)
        cache = self._cache
        if cache is None:
            most = self._head.host.max_positions
            cache = self._cache = self._pass.new_cache(max(self._room, stop), most)
        self._pass.reserve(cache, stop)
        cache.begin(numbers, starts)
        return cache


def _picked(states: Tensor, index: Tensor) -> Tensor:
    """Pick T of n entries: ``[R, n, C]`` by ``[R, T]`` gives ``[R, T, C]``."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))
