"""Plain decoding: one decode step of the target per token, on the same cache as speculation.

Shapes: B sequences, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import Decodes, Engine
from falcon_lab.decoding.generation import PhaseClock, Round
from falcon_lab.decoding.round import DecodedSequence, Rounds
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.interfaces import DraftTokens, LayerPlan
from falcon_lab.sampling import Sampling, most_likely

if TYPE_CHECKING:
    from falcon_lab.decoding.target_sequences import TargetSequences
    from falcon_lab.model.kv_cache import KVCache
    from falcon_lab.model.target import Target


class PlainEngine(Engine):
    """What every speed-up is measured against.

    Args:
        target: the model.
        decoding: how to run it; None: the defaults.
        shares_beginnings: do not read again what a prompt has in common with the text before it in
            its place. Off where speed is compared, as a drafter must see every prompt whole.
    """

    lossless = True
    max_nodes = 0

    def __init__(
        self,
        target: Target,
        *,
        decoding: DecodingConfig | None = None,
        shares_beginnings: bool = False,
    ) -> None:
        self.target = target
        self.decoding = decoding or DecodingConfig()
        self._shares_beginnings = shares_beginnings

    def rounds(self, sequences: TargetSequences, count: int, length: int) -> Rounds:
        """Make rounds of one step."""
        shares = self._shares_beginnings and count > 1
        chunk = self.decoding.prefill_chunk
        return PlainRounds(self.target, sequences, chunk, shares_beginnings=shares)

    def drafter_bytes(self, length: int) -> int:
        """Return 0: nothing is drafted."""
        return 0


class PlainRounds:
    """A token for every sequence.

    Args:
        target: the model.
        sequences: its passes over all of them.
        chunk: tokens of a prompt that are read in one pass.
        shares_beginnings: as of ``PlainEngine``.
    """

    def __init__(
        self,
        target: Target,
        sequences: TargetSequences,
        chunk: int,
        *,
        shares_beginnings: bool = False,
    ) -> None:
        self._target = target
        self._sequences = sequences
        self._chunk = chunk
        self._shares_beginnings = shares_beginnings
        self._read: dict[int, DecodedSequence] = {}  # place -> whose text is in its memory

    def admit(self, place: int, sequence: DecodedSequence, cache: KVCache) -> None:
        """Read a new sequence's prompt, and draw its root."""
        prompt = sequence.prompt
        if self._shares_beginnings:
            kept = self._kept(place, prompt[:-1])
            self._read[place] = sequence
            cache.resume(kept)
            prompt = prompt[kept:]
        passes = self._target.read(prompt, cache, chunk=self._chunk)
        output = deque(passes, maxlen=1).pop()  # the last one's logits are all that is wanted
        sequence.root = sequence.draw(output.logits[-1])

    def _kept(self, place: int, prompt: Tensor) -> int:
        """Return how many tokens of a prompt a place's memory begins with."""
        if (before := self._read.get(place)) is None:
            return 0
        # The newest token of a text was never read.
        written = prompt.new_tensor(before.transcript.tokens[:-1])
        return common_beginning(prompt, torch.cat((before.prompt, written)))

    def move(self, source: int, goal: int) -> None:
        """Move what is known of a place's memory, which has moved."""
        if source in self._read:
            self._read[goal] = self._read.pop(source)

    def run(self, sequences: Sequence[DecodedSequence], clock: PhaseClock) -> None:
        """Add a token to every sequence."""
        clock.lap("overhead")
        logits = self._step([sequence.root for sequence in sequences])
        clock.lap("verify")
        roots = self._draw(logits, sequences)
        kept = [
            sequence.transcript.extend([token])
            for sequence, token in zip(sequences, roots.tolist(), strict=True)
        ]
        clock.lap("accept")
        for sequence, root, added in zip(sequences, roots.unbind(), kept, strict=True):
            sequence.root = root
            sequence.rounds.append(Round(nodes=0, depth=0, passes=0, accepted=0, emitted=1))
            if sequence.on_round is not None:
                sequence.on_round(added, 0, None, None)

    def _step(self, roots: list[Tensor]) -> Tensor:
        """Read and commit every sequence's newest token; ``[B, V]`` logits."""
        return self._sequences.step(roots)

    @staticmethod
    def _draw(logits: Tensor, sequences: Sequence[DecodedSequence]) -> Tensor:
        """Draw a token of every sequence in its own way: ``[B, V]`` -> ``[B]``."""
        sampled = [place for place, one in enumerate(sequences) if not one.sampling.greedy]
        if len(sampled) == len(sequences):
            return torch.stack(
                [one.draw(of_one) for one, of_one in zip(sequences, logits, strict=True)]
            )
        roots = most_likely(logits)
        for place in sampled:
            roots[place] = sequences[place].draw(logits[place])
        return roots


class PartEngine(PlainEngine):
    """Plain decoding with a part of the layers, which is lossy; prompts are read by all of them.

    Args:
        target: the model.
        plan: the part, to the final norm.
        decoding: how to run it; None: the defaults.
    """

    lossless = False

    def __init__(
        self, target: Target, plan: LayerPlan, *, decoding: DecodingConfig | None = None
    ) -> None:
        super().__init__(target, decoding=decoding)
        self.plan = plan

    def rounds(self, sequences: TargetSequences, count: int, length: int) -> Rounds:
        """Make rounds of one step through the part."""
        return PartRounds(self.target, sequences, self.plan, self.decoding.prefill_chunk)


class PartRounds(PlainRounds):
    """A token for every sequence, by a part of the layers.

    Args:
        target: the model.
        sequences: its passes over all of them.
        plan: the part.
        chunk: tokens of a prompt that are read in one pass.
    """

    def __init__(
        self, target: Target, sequences: TargetSequences, plan: LayerPlan, chunk: int
    ) -> None:
        super().__init__(target, sequences, chunk)
        self._plan = plan

    def _step(self, roots: list[Tensor]) -> Tensor:
        zero = torch.zeros_like(roots[0]).reshape(1)
        newest = {place: DraftTokens(root.reshape(1), zero) for place, root in enumerate(roots)}
        found = self._sequences.run(newest, self._plan)
        self._sequences.keep()
        return self._target.head(torch.cat([found[place] for place in newest]))


def common_beginning(first: Tensor, second: Tensor) -> int:
    """Return how many tokens two texts have in common before they differ."""
    least = min(len(first), len(second))
    return int((first[:least] == second[:least]).long().cumprod(0).sum())


@torch.inference_mode()
def continue_texts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    length: int,
    *,
    batch_size: int = 96,
    engine: Decodes | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Let a target continue texts greedily, side by side.

    Args:
        target: the model.
        prompts: lists of at least one and at most ``length`` tokens.
        length: tokens of a text at the most, its prompt counted. A text ends before with one of
            the target's end tokens.
        batch_size: texts side by side; one that has ended gives its place to the next.
        engine: decodes them; None: the target itself.

    Yields:
        Each prompt's number, and the prompt with what follows it, as soon as it has ended.
    """
    stop, draws = StopCondition(target.eos_ids), torch.Generator(target.device)
    waiting = deque[DecodedSequence]()
    for number, text in enumerate(prompts):
        if len(text) < length:
            prompt = torch.tensor(text, device=target.device)
            transcript = begin(prompt, length - len(text), target.max_positions, stop)
            waiting.append(DecodedSequence(number, prompt, transcript, Sampling(), draws))
        else:
            yield number, list(text)
    for ended in (engine or PlainEngine(target)).decode(waiting, batch_size):
        yield ended.number, [*prompts[ended.number], *ended.transcript.tokens]
