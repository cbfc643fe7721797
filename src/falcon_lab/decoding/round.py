"""One round of speculative decoding, over one sequence or several: ``SpeculativeRounds.run``.

Shapes: B sequences, P prompt tokens, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from falcon_lab.decoding.accepting import Accepted, accept
from falcon_lab.decoding.drafting import observation, with_auxiliary
from falcon_lab.decoding.generation import Generation, Laps, OnRound, PhaseClock, Round, Seconds
from falcon_lab.drafters.sequences import OneByOne
from falcon_lab.interfaces import (
    BeginsRounds,
    Budget,
    Frontier,
    RoundContext,
    RoundOutcome,
    RunsTarget,
    begins_rounds,
)
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.decoding.stopping import Transcript
    from falcon_lab.decoding.target_sequences import TreePasses
    from falcon_lab.interfaces import (
        AcceptanceRule,
        Drafter,
        DraftSequences,
        LengthController,
        TreeBuilder,
    )
    from falcon_lab.model.kv_cache import KVCache
    from falcon_lab.model.target import Target, TargetOutput
    from falcon_lab.sampling import Sampling


@dataclass(slots=True)
class DecodedSequence:
    """A sequence that is being decoded.

    Attributes:
        number: of its prompt.
        prompt: ``[P]`` long.
        transcript: what was written so far.
        sampling: how its tokens are drawn.
        generator: the source of its randomness.
        on_round: called with every round's tokens, and with the first one.
        root: 0-d long, the newest token, not yet read by the target.
        rounds: its verifications so far.
        laps: of what it took part in, and its share of them.
    """

    number: int
    prompt: Tensor
    transcript: Transcript
    sampling: Sampling
    generator: torch.Generator
    on_round: OnRound | None = None
    root: Tensor = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    laps: list[tuple[Laps, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether its text is complete."""
        return self.transcript.finish is not None

    def newest(self, count: int) -> list[int]:
        """Return the newest committed tokens, the root last."""
        written, rest = self.transcript.tokens, count - len(self.transcript.tokens)
        if rest <= 0:
            return written[len(written) - count :]
        return [*self.prompt[-rest:].tolist(), *written]

    def draw(self, logits: Tensor) -> Tensor:
        """Draw what follows from its ``[V]`` logits: 0-d long."""
        return self.sampling.draw(logits, self.generator)

    def add(self, tokens: list[int]) -> list[int]:
        """Add plainly decoded tokens; return those that are in the text."""
        kept = self.transcript.extend(tokens)
        if self.on_round is not None:
            self.on_round(kept, 0, None, None)
        return kept

    def generation(self) -> Generation:
        """Return the text of a sequence that has ended."""
        assert self.transcript.finish is not None
        seconds = Seconds()
        for laps, share in self.laps:
            laps.add_to(seconds, share)
        return Generation(self.transcript.tokens, self.transcript.finish, self.rounds, seconds)


def share_out(clock: PhaseClock, sequences: Sequence[DecodedSequence]) -> None:
    """Give the laps since the last time to sequences, evenly."""
    laps = clock.take()
    for sequence in sequences:
        sequence.laps.append((laps, 1 / len(sequences)))


class Rounds(Protocol):
    """What is done for sequences at their places 0, 1, 2, …"""

    def admit(self, place: int, sequence: DecodedSequence, cache: KVCache) -> None:
        """Read a new sequence's prompt, and draw its root."""
        ...

    def move(self, source: int, goal: int) -> None:
        """Take a sequence to another place, whose own has ended."""
        ...

    def run(self, sequences: Sequence[DecodedSequence], clock: PhaseClock) -> None:
        """Add to every sequence."""
        ...


class Components(NamedTuple):
    """What a sequence is drafted and accepted with, its drafter apart."""

    builder: TreeBuilder
    rule: AcceptanceRule
    controller: LengthController


class SpeculativeRounds:
    """A tree for every sequence, each grown, accepted and followed up by components of its own.

    Args:
        target: the model, tapped where the drafter asks for it.
        sequences: the model's passes over all of them.
        drafter: whose needs hold.
        drafts: its side of the sequences.
        parts: the other components of every place.
        chunk: tokens of a prompt that are read in one pass.
    """

    def __init__(
        self,
        target: Target,
        sequences: TreePasses,
        drafter: Drafter,
        drafts: DraftSequences,
        parts: list[Components],
        *,
        chunk: int,
    ) -> None:
        self._target = target
        self._sequences = sequences
        self._drafter = drafter
        self._drafts = drafts
        self._own = drafts.drafters if isinstance(drafts, OneByOne) else ()
        if isinstance(drafts, RunsTarget):
            drafts.attach(sequences)
        begins = isinstance(drafts, BeginsRounds) and begins_rounds(drafter)
        self._beginning = cast(BeginsRounds, drafts) if begins else None
        self._parts = parts
        self._chunk = chunk
        self._runs_target = drafter.provisional(parts[0].builder) > 0

    def admit(self, place: int, sequence: DecodedSequence, cache: KVCache) -> None:
        """Read a new sequence's prompt, and draw its root.

        The drafter observes every pass as it comes; what follows the last one is the root.
        """
        self._parts[place].controller.begin_sequence(sequence.sampling)
        self._parts[place].controller.reset()
        self._parts[place].builder.reset()
        self._drafts.reset(place, sequence.prompt[0])
        prompt, left = sequence.prompt, len(sequence.prompt)
        for output in self._target.read(prompt, cache, chunk=self._chunk):
            first, left = len(prompt) - left + 1, left - len(output.features)
            known = prompt[first : len(prompt) - left + 1]
            if not left:
                sequence.root = sequence.draw(output.logits[-1])
                known = torch.cat((known, sequence.root[None]))
            self._drafts.observe(place, observation(self._drafter, known, output, remaining=left))

    def move(self, source: int, goal: int) -> None:
        """Take a sequence's components to another place."""
        parts = self._parts
        parts[goal], parts[source] = parts[source], parts[goal]
        self._drafts.move(source, goal)

    def run(self, sequences: Sequence[DecodedSequence], clock: PhaseClock) -> None:
        """Draft, verify, accept and commit."""
        trees, passes = self._draft(sequences, clock)
        clock.lap("overhead")

        outputs = self._sequences.verify(trees)
        clock.lap("verify")

        logits = [output.logits for output in outputs]
        rules = [part.rule for part in self._parts[: len(trees)]]
        draws = [(sequence.sampling, sequence.generator) for sequence in sequences]
        accepted = accept(rules, trees, logits, draws)
        kept = [
            sequence.transcript.extend(one.listed)
            for sequence, one in zip(sequences, accepted, strict=True)
        ]
        clock.lap("accept")

        self._sequences.commit(accepted)
        outcomes = [
            self._follow_up(place, trees[place], outputs[place], accepted[place])
            for place in range(len(trees))
        ]
        clock.lap("commit")

        for place, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
            one, tree, added = accepted[place], trees[place], kept[place]
            sequence.root = one.tokens[-1]
            drafted = min(outcome.accepted, len(added))
            shape = outcome.nodes, outcome.drafted, passes[place]
            layers = self._sequences.layers_run(place) if self._runs_target else None
            sequence.rounds.append(Round(*shape, drafted, len(added), tree.auxiliary, layers))
            if sequence.on_round is not None:
                sequence.on_round(added, drafted, tree, one.acceptance)
        clock.lap("overhead")

    def _draft(
        self, sequences: Sequence[DecodedSequence], clock: PhaseClock
    ) -> tuple[list[TokenTree], list[int]]:
        """Let drafter and tree builders take turns; every sequence's tree and passes."""
        frontiers: dict[int, Frontier] = {}
        for place, sequence in enumerate(sequences):
            budget = at_most(self._parts[place].controller.budget(), depth=_room(sequence))
            drawing = sequence.sampling, sequence.generator
            context = RoundContext(sequence.root, budget, *drawing, sequence.newest)
            if (frontier := self._parts[place].builder.start(context)) is not None:
                frontiers[place] = frontier
                if self._beginning is not None:
                    self._beginning.begin_round(place, context)
        passes = [0] * len(sequences)
        while frontiers:
            clock.lap("overhead")
            outputs, frontiers = self._drafts.draft(frontiers), {}
            clock.lap("draft")
            for place, output in outputs.items():
                passes[place] += 1
                builder, _, controller = self._parts[place]
                further = builder.grow(output)
                if further is not None and controller.keep_going(passes[place], output):
                    frontiers[place] = further
        trees = [self._tree(place, sequence) for place, sequence in enumerate(sequences)]
        return trees, passes

    def _tree(self, place: int, sequence: DecodedSequence) -> TokenTree:
        """Finish a sequence's tree, with what its drafter has the target read besides."""
        builder = self._parts[place].builder
        tree = builder.finish()
        if not self._own:
            return tree
        return with_auxiliary(self._own[place], tree, _room(sequence), builder)

    def _follow_up(
        self, place: int, tree: TokenTree, output: TargetOutput, accepted: Accepted
    ) -> RoundOutcome:
        """Hand what was committed to a sequence's drafter, controller and tree builder."""
        if tree.auxiliary:
            self._own[place].observe_auxiliary(tree, output.logits, accepted.acceptance)
        seen = observation(self._drafter, accepted.tokens, output, accepted.nodes)
        self._drafts.observe(place, seen)
        path = accepted.path
        outcome = RoundOutcome(tree.max_depth, tree.drafted, len(path) - 1, path, tree)
        self._parts[place].controller.update(outcome)
        self._parts[place].builder.update(outcome)
        return outcome


def at_most(budget: Budget, *, depth: int) -> Budget:
    """Limit the depth of a budget.

    A round adds one token more than its depth, so that with ``depth`` one less than what is still
    to be written nothing is drafted in vain, and no node lies beyond the target's last position.
    """
    return replace(budget, depth=depth if budget.depth is None else min(budget.depth, depth))


def _room(sequence: DecodedSequence) -> int:
    """Return the greatest depth that a node of the coming round may have."""
    return sequence.transcript.remaining - 1
