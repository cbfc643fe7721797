"""Engines: prompts in, texts out, one at a time or several side by side.

An engine admits prompts to places, runs rounds over the sequences in use (``round.py``), and gives
the place of a text that has ended to the next prompt. Sequences share passes and nothing else, so
that each prompt's text is what it would be alone.

Shapes: B sequences, P prompt tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.generation import Generation, OnRound, PhaseClock
from falcon_lab.decoding.memory import check_kv_memory
from falcon_lab.decoding.round import (
    Components,
    DecodedSequence,
    Rounds,
    SpeculativeRounds,
    share_out,
)
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.decoding.target_sequences import TargetSequences, TreePasses, target_sequences
from falcon_lab.drafters.sequences import copies_of, sequences_of
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    AcceptanceRule,
    Drafter,
    LengthController,
    TreeBuilder,
)
from falcon_lab.sampling import Sampling

if TYPE_CHECKING:
    from falcon_lab.model.target import Target


class Decodes(Protocol):
    """Whatever decodes sequences: an engine, or a server that runs the target."""

    def decode(
        self, waiting: deque[DecodedSequence], batch_size: int, *, longest: int | None = None
    ) -> Iterator[DecodedSequence]:
        """Decode sequences; yield each when it has ended (``Engine.decode``)."""
        ...


class Engine(ABC):
    """A target, and a way to decode with it.

    Attributes:
        target: the model.
        decoding: how to run it.
        opaque: False: it times its own rounds.
    """

    target: Target
    decoding: DecodingConfig
    opaque = False

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether the output is the target's own."""

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Most positions that a round needs beyond the text."""

    @abstractmethod
    def rounds(self, sequences: TargetSequences, count: int, length: int) -> Rounds:
        """Make what is done round by round for ``count`` sequences of up to ``length`` tokens."""

    @abstractmethod
    def drafter_bytes(self, length: int) -> int:
        """Return the bytes that drafting for a sequence of that length needs."""

    @property
    def drafter_allocated(self) -> int:
        """Return the bytes that the drafter reserves from one sequence to the next."""
        return 0

    @torch.inference_mode()
    def generate(
        self,
        prompt: Tensor,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
        stop: StopCondition,
        on_round: OnRound | None = None,
    ) -> Generation:
        """Continue a prompt.

        Args:
            prompt: ``[P]`` long, at least one token, on the target's device.
            max_new_tokens: most tokens to add; fewer when the target's context ends before.
            sampling: how tokens are drawn from the target.
            generator: the source of all randomness, on the target's device.
            stop: what ends the text.
            on_round: called with every round's tokens, and with the first token.

        Raises:
            FalconLabError: the prompt is empty or longer than the target's context, or there is
                no memory for its keys and values.
        """
        transcript = begin(prompt, max_new_tokens, self.target.max_positions, stop)
        sequence = DecodedSequence(0, prompt, transcript, sampling, generator, on_round)
        for _ in self.decode(deque([sequence]), 1):
            pass
        return sequence.generation()

    def generate_batch(
        self,
        prompts: Sequence[Tensor],
        *,
        batch_size: int,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        stop: StopCondition,
    ) -> list[Generation]:
        """Continue prompts as ``stream`` does; return the texts in the order of the prompts."""
        found = self.stream(
            prompts,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            generators=generators,
            stop=stop,
        )
        return [generation for _, generation in sorted(found, key=lambda pair: pair[0])]

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Tensor],
        *,
        batch_size: int,
        max_new_tokens: int,
        sampling: Sampling,
        generators: Sequence[torch.Generator],
        stop: StopCondition,
    ) -> Iterator[tuple[int, Generation]]:
        """Continue prompts; yield each one's number and text as soon as it has ended.

        A drafter that cannot draft for several sequences itself is copied, as are tree builder,
        acceptance rule and controller (``drafters/sequences.py``).

        Args:
            prompts: ``[P]`` long each, at least one token, on the target's device.
            batch_size: B, most sequences at a time.
            max_new_tokens: most tokens to add to each.
            sampling: how tokens are drawn from the target.
            generators: each prompt's own source of randomness, on the target's device.
            stop: what ends a text.

        Raises:
            FalconLabError: ``batch_size`` is less than 1, a prompt is empty or longer than the
                target's context, or there is no memory for the keys and values of all sequences
                (``decoding.kv_memory`` is for all of them together).
        """
        if batch_size < 1:
            raise FalconLabError(f"a batch has at least one sequence, not {batch_size}")
        waiting = deque[DecodedSequence]()
        for number, (prompt, own) in enumerate(zip(prompts, generators, strict=True)):
            transcript = begin(prompt, max_new_tokens, self.target.max_positions, stop)
            waiting.append(DecodedSequence(number, prompt, transcript, sampling, own))
        for sequence in self.decode(waiting, batch_size):
            yield sequence.number, sequence.generation()

    def decode(
        self, waiting: deque[DecodedSequence], batch_size: int, *, longest: int | None = None
    ) -> Iterator[DecodedSequence]:
        """Decode sequences side by side; yield each when it has ended.

        Args:
            waiting: in their order; empty in the end. Whoever is given a sequence may add others
                before going on, of which the first one is read into the place that is free now.
            batch_size: B, most sequences at a time; no more than wait at the beginning.
            longest: tokens of a text at the most, its prompt counted; None: of those that wait.

        Raises:
            FalconLabError: there is no memory for so many sequences of this length.
        """
        if not waiting:
            return
        if longest is None:
            longest = max(len(one.prompt) + one.transcript.remaining for one in waiting)
        places = _Places(self, waiting, min(batch_size, len(waiting)), longest)
        while places.sequences:
            yield from places.take_ended()
            places.run_round()

    def check_memory(self, count: int, length: int) -> None:
        """Refuse ``count`` sequences of up to ``length`` tokens that there is no memory for."""
        target, nodes = self.target, self.max_nodes

        def bytes_of(length: int) -> int:
            # One sequence may have a cache of another capacity (compiled passes, CUDA graphs).
            room = length + nodes
            own = target.kv_bytes(room) if count == 1 else target.batch_bytes(count, room)
            return own + count * self.drafter_bytes(length)

        check_kv_memory(
            bytes_of,
            length,
            limit_gib=self.decoding.kv_memory,
            device=target.device,
            sequences=count,
            allocated=target.kv_allocated + self.drafter_allocated if count == 1 else 0,
        )


class _Places:
    """The sequences in use, by place, and those that wait for one."""

    def __init__(
        self, engine: Engine, waiting: deque[DecodedSequence], count: int, longest: int
    ) -> None:
        engine.check_memory(count, longest)
        self._clock = PhaseClock.on(engine.target.device)
        self._target = target_sequences(engine.target, count, longest + engine.max_nodes)
        self._rounds = engine.rounds(self._target, count, longest)
        self._waiting = waiting
        self.sequences: list[DecodedSequence] = []
        for place in range(count):
            self.sequences.append(self._admit(place))

    def run_round(self) -> None:
        """Run a round over all sequences in use."""
        if self.sequences:
            self._rounds.run(self.sequences, self._clock)
            share_out(self._clock, self.sequences)

    def take_ended(self) -> Iterator[DecodedSequence]:
        """Yield the sequences that have ended; their places go to those that wait."""
        for place in reversed(range(len(self.sequences))):
            while place < len(self.sequences) and self.sequences[place].ended:
                yield self.sequences[place]
                self._clock.start()  # the time of the caller is not part of decoding
                if self._waiting:
                    self.sequences[place] = self._admit(place)
                else:
                    self._drop(place)
                    break

    def _admit(self, place: int) -> DecodedSequence:
        """Read the next prompt; no other sequence is touched."""
        sequence = self._waiting.popleft()
        cache = self._target.open(place)
        self._rounds.admit(place, sequence, cache)
        self._target.fill(place, cache)
        kept = sequence.transcript.extend([int(sequence.root)])
        self._clock.lap("prefill")
        share_out(self._clock, [sequence])
        if sequence.on_round is not None:
            sequence.on_round(kept, 0, None, None)
        return sequence

    def _drop(self, place: int) -> None:
        """Give up a place; the last sequence moves there."""
        self._target.drop(place)
        last = self.sequences.pop()
        if place < len(self.sequences):
            self.sequences[place] = last
            self._rounds.move(len(self.sequences), place)


class SpeculativeEngine(Engine):
    """A target, and the four components that make it faster.

    Args:
        target: the frozen model; the engine's own is tapped where the drafter asks for it.
        drafter: proposes tokens.
        tree_builder: grows a tree of them.
        rule: accepts a path of the tree.
        controller: decides how much to draft.
        decoding: how to run them; None: the defaults.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        tree_builder: TreeBuilder,
        rule: AcceptanceRule,
        controller: LengthController,
        *,
        decoding: DecodingConfig | None = None,
    ) -> None:
        self.target = target.tapped(drafter.taps)
        self.drafter = drafter
        self.tree_builder = tree_builder
        self.rule = rule
        self.controller = controller
        self.decoding = decoding or DecodingConfig()

    def with_tree(self, builder: TreeBuilder) -> SpeculativeEngine:
        """Return an engine of the same parts with another tree builder."""
        parts = (self.target, self.drafter, builder, self.rule, self.controller)
        return SpeculativeEngine(*parts, decoding=self.decoding)

    @property
    def max_nodes(self) -> int:
        """Most nodes of a round, auxiliary nodes counted, or positions that drafting takes."""
        nodes = self.tree_builder.max_nodes + self.drafter.most_auxiliary(self.tree_builder)
        provisional = self.drafter.provisional(self.tree_builder)
        return max(nodes, provisional + (nodes if self.drafter.lower_layers else 0))

    @property
    def lossless(self) -> bool:
        """Whether the output is the target's own."""
        return self.rule.lossless

    def rounds(self, sequences: TargetSequences, count: int, length: int) -> Rounds:
        """Make speculative rounds; one sequence has the engine's own components, others copies."""
        parts = [Components(self.tree_builder, self.rule, self.controller)]
        if count > 1:
            copies = (copies_of(part, count) for part in parts[0])
            parts = [Components(*own) for own in zip(*copies, strict=True)]
        passes: TreePasses = sequences
        if self.drafter.lower_layers:
            from falcon_lab.decoding.continuing import ContinuedPasses

            passes = ContinuedPasses(self.target, sequences, self.drafter)
        return SpeculativeRounds(
            self.target,
            passes,
            self.drafter,
            sequences_of(self.drafter, count, length, self.tree_builder),
            parts,
            chunk=self.decoding.prefill_chunk,
        )

    def drafter_bytes(self, length: int) -> int:
        """Return what the drafter counts."""
        return self.drafter.kv_bytes(length, self.tree_builder)

    @property
    def drafter_allocated(self) -> int:
        """Return the bytes that the drafter reserves from one sequence to the next."""
        return self.drafter.kv_allocated
