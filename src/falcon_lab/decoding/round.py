"""What the batched engine knows about a row, and how it shares out the time.

Shapes: P prompt tokens.

A round of all rows at once: one target pass, and one drafter pass for all that still draft.

Shapes: B rows in use, N tree nodes, A accepted draft tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.decoding.accepting import accept_rows
from falcon_lab.decoding.batch_drafting import asking, copies_of, sequences_of
from falcon_lab.decoding.engine import at_most
from falcon_lab.decoding.generation import Clock, DeviceClock, Generation, Round, Seconds, clock_for
from falcon_lab.decoding.observing import observation, with_auxiliary
from falcon_lab.decoding.stopping import Transcript
from falcon_lab.interfaces import Acceptance, Frontier, RoundContext, RoundOutcome
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.decoding.plain import PlainEngine
    from falcon_lab.model.kv_cache import BatchCache, KVCache


@dataclass(slots=True)
class Row:
    """A sequence that is being decoded.

    Attributes:
        number: of its prompt.
        prompt: ``[P]`` long.
        transcript: what was written so far.
        generator: the source of its randomness.
        root: 0-d long, the newest token, not yet read by the target.
        rounds: its verifications so far.
        laps: clocks of what it took part in, and its share of each.
    """

    number: int
    prompt: Tensor
    transcript: Transcript
    generator: torch.Generator
    root: Tensor = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    laps: list[tuple[Clock | DeviceClock, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether its text is complete."""
        return self.transcript.finish is not None

    def generation(self) -> Generation:
        """The text of a row that has ended."""
        assert self.transcript.finish is not None
        return Generation(
            self.transcript.tokens, self.transcript.finish, self.rounds, self._seconds()
        )

    def _seconds(self) -> Seconds:
        found = Seconds()
        for clock, share in self.laps:
            taken = clock.seconds
            for part in fields(Seconds):
                more = share * getattr(taken, part.name)
                setattr(found, part.name, getattr(found, part.name) + more)
        return found


def share_out(clock: Clock | DeviceClock, rows: Sequence[Row]) -> None:
    """A clock's time is that of these rows, evenly, so that all rows' times add up."""
    for row in rows:
        row.laps.append((clock, 1 / len(rows)))


class PlainRounds:
    """A token for every row.

    Args:
        engine: what is done for every row.
        sampling: how tokens are drawn.
    """

    def __init__(self, engine: PlainEngine, sampling: Sampling) -> None:
        self._target = engine.target
        self._chunk = engine.decoding.prefill_chunk
        self._sampling = sampling

    def admit(self, place: int, row: Row, cache: KVCache) -> None:
        """Read a new row's prompt, and draw its first token."""
        passes = self._target.read(row.prompt, cache, chunk=self._chunk)
        output = deque(passes, maxlen=1).pop()  # the last one's logits are all that is wanted
        row.root = self._sampling.draw(output.logits[-1], row.generator)

    def move(self, source: int, goal: int) -> None:
        """A row goes to another place: nothing to be done."""

    def round(self, rows: Sequence[Row], cache: BatchCache) -> None:
        """Add a token to every row."""
        clock = clock_for(self._target.device)
        output = self._target.step_batch(torch.stack([row.root for row in rows]), cache)
        clock.lap("verify")
        tokens = self._draw(output.logits, rows)
        for row, root, token in zip(rows, tokens, tokens.tolist(), strict=True):
            row.root = root
            row.transcript.extend([token])
            row.rounds.append(Round(nodes=0, depth=0, passes=0, accepted=0, emitted=1))
        clock.lap("accept")
        cache.keep([[0]] * len(rows))
        clock.lap("commit")
        share_out(clock, rows)

    def _draw(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """``[B, V]`` -> ``[B]``, each row with its own generator."""
        if self._sampling.greedy:
            return logits.argmax(-1)
        draws = [
            self._sampling.draw(of_row, row.generator)
            for of_row, row in zip(logits, rows, strict=True)
        ]
        return torch.stack(draws)


class SpeculativeRounds:
    """A tree for every row, each grown, accepted and followed up by components of its own.

    Args:
        engine: what is copied for every row.
        sampling: how tokens are drawn.
        count: rows.
        positions: of the longest of them.
    """

    def __init__(
        self, engine: SpeculativeEngine, sampling: Sampling, count: int, positions: int
    ) -> None:
        self._target = engine.target
        self._chunk = engine.decoding.prefill_chunk
        self._sampling = sampling
        self._builders = copies_of(engine.tree_builder, count)
        self._rules = copies_of(engine.rule, count)
        self._controllers = copies_of(engine.controller, count)
        self._drafter = engine.drafter
        self._drafts = sequences_of(engine.drafter, count, positions, engine.tree_builder)

    def admit(self, place: int, row: Row, cache: KVCache) -> None:
        """Read a new row's prompt, and draw its first token.

        The drafter is told of every pass as it comes; what follows the last one is the root.
        """
        self._controllers[place].reset()
        self._drafts.reset(place, row.prompt[0])
        left = len(row.prompt)
        for output in self._target.read(row.prompt, cache, chunk=self._chunk):
            first, left = len(row.prompt) - left + 1, left - len(output.features)
            known = row.prompt[first : len(row.prompt) - left + 1]
            if not left:
                row.root = self._sampling.draw(output.logits[-1], row.generator)
                known = torch.cat((known, row.root[None]))
            self._drafts.observe(place, observation(self._drafter, known, output, remaining=left))

    def move(self, source: int, goal: int) -> None:
        """A row goes to another place, and its components with it."""
        for parts in (self._builders, self._rules, self._controllers):
            _swap(parts, source, goal)
        self._drafts.move(source, goal)

    def round(self, rows: Sequence[Row], cache: BatchCache) -> None:
        """Draft, verify, accept and commit."""
        clock = clock_for(self._target.device)
        trees, passes = self._draft(rows, clock)
        trees = [self._with_auxiliary(place, row, trees[place]) for place, row in enumerate(rows)]
        clock.lap("overhead")

        output = self._target.verify_batch(trees, cache)
        clock.lap("verify")

        counts = [tree.nodes for tree in trees]
        accepted = accept_rows(
            self._rules[: len(rows)],
            trees,
            output.logits.split(counts),
            self._sampling,
            [row.generator for row in rows],
        )
        kept = [row.transcript.extend(one.listed) for row, one in zip(rows, accepted, strict=True)]
        clock.lap("accept")

        cache.keep([one.path for one in accepted])
        outputs = output.split(counts)
        for place, (row, one, tree) in enumerate(zip(rows, accepted, trees, strict=True)):
            row.root = one.tokens[-1]
            if tree.auxiliary and (drafter := asking(self._drafts, place)) is not None:
                acceptance = Acceptance(one.nodes, row.root)
                drafter.observe_auxiliary(tree, outputs[place].logits, acceptance)
            seen = observation(self._drafter, one.tokens, outputs[place], one.nodes)
            self._drafts.observe(place, seen)
            outcome = RoundOutcome(tree.max_depth, tree.drafted, len(one.path) - 1)
            self._controllers[place].update(outcome)
            added = len(kept[place])
            drafted = min(outcome.accepted, added)
            counts_of = (outcome.nodes, outcome.drafted, passes[place], drafted, added)
            row.rounds.append(Round(*counts_of, tree.auxiliary))
        clock.lap("commit")
        share_out(clock, rows)

    def _with_auxiliary(self, place: int, row: Row, tree: TokenTree) -> TokenTree:
        """Return a sequence's tree with the auxiliary nodes of its drafter."""
        drafter = asking(self._drafts, place)
        if drafter is None:
            return tree
        return with_auxiliary(drafter, tree, row.transcript.remaining - 1)

    def _draft(
        self, rows: Sequence[Row], clock: Clock | DeviceClock
    ) -> tuple[list[TokenTree], list[int]]:
        """Drafter and tree builders take turns; every row's tree and number of passes."""
        frontiers: dict[int, Frontier] = {}
        for place, row in enumerate(rows):
            remaining = row.transcript.remaining - 1
            budget = at_most(self._controllers[place].budget(), depth=remaining)
            context = RoundContext(row.root, budget, self._sampling, row.generator)
            if (frontier := self._builders[place].start(context)) is not None:
                frontiers[place] = frontier
        passes = [0] * len(rows)
        while frontiers:
            clock.lap("overhead")
            outputs, frontiers = self._drafts.draft(frontiers), {}
            clock.lap("draft")
            for place, output in outputs.items():
                passes[place] += 1
                further = self._builders[place].grow(output)
                if further is not None and self._controllers[place].keep_going(
                    passes[place], output
                ):
                    frontiers[place] = further
        return [self._builders[place].finish() for place in range(len(rows))], passes


def _swap(parts: list[Any], source: int, goal: int) -> None:
    parts[goal], parts[source] = parts[source], parts[goal]
