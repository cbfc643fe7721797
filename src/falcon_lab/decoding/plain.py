"""Plain decoding: one decode step of the target per token, on the same cache as speculation.

Shapes: B sequences, P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import Engine
from falcon_lab.decoding.generation import PhaseClock, Round
from falcon_lab.decoding.round import DecodedSequence, Rounds
from falcon_lab.decoding.stopping import StopCondition, begin
from falcon_lab.sampling import Sampling

if TYPE_CHECKING:
    from falcon_lab.decoding.target_sequences import TargetSequences
    from falcon_lab.model.kv_cache import KVCache
    from falcon_lab.model.target import Target


class PlainEngine(Engine):
    """What every speed-up is measured against.

    Args:
        target: the model.
        decoding: how to run it; None: the defaults.
    """

    lossless = True
    max_nodes = 0

    def __init__(self, target: Target, *, decoding: DecodingConfig | None = None) -> None:
        self.target = target
        self.decoding = decoding or DecodingConfig()

    def rounds(
        self, sequences: TargetSequences, count: int, length: int, sampling: Sampling
    ) -> Rounds:
        """Make rounds of one step."""
        return PlainRounds(self.target, sequences, sampling, self.decoding.prefill_chunk)

    def drafter_bytes(self, length: int) -> int:
        """Return 0: nothing is drafted."""
        return 0


class PlainRounds:
    """A token for every sequence.

    Args:
        target: the model.
        sequences: its passes over all of them.
        sampling: how tokens are drawn.
        chunk: tokens of a prompt that are read in one pass.
    """

    def __init__(
        self, target: Target, sequences: TargetSequences, sampling: Sampling, chunk: int
    ) -> None:
        self._target = target
        self._sequences = sequences
        self._sampling = sampling
        self._chunk = chunk

    def admit(self, place: int, sequence: DecodedSequence, cache: KVCache) -> None:
        """Read a new sequence's prompt, and draw its root."""
        passes = self._target.read(sequence.prompt, cache, chunk=self._chunk)
        output = deque(passes, maxlen=1).pop()  # the last one's logits are all that is wanted
        sequence.root = self._sampling.draw(output.logits[-1], sequence.generator)

    def move(self, source: int, goal: int) -> None:
        """Do nothing: a place has no components."""

    def run(self, sequences: Sequence[DecodedSequence], clock: PhaseClock) -> None:
        """Add a token to every sequence."""
        clock.lap("overhead")
        logits = self._sequences.step([sequence.root for sequence in sequences])
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

    def _draw(self, logits: Tensor, sequences: Sequence[DecodedSequence]) -> Tensor:
        """Draw a token of every sequence with its own generator: ``[B, V]`` -> ``[B]``."""
        if self._sampling.greedy:
            return logits.argmax(-1)
        draws = [
            self._sampling.draw(of_one, sequence.generator)
            for of_one, sequence in zip(logits, sequences, strict=True)
        ]
        return torch.stack(draws)


def continue_texts(
    target: Target, prompts: Sequence[Sequence[int]], length: int
) -> list[list[int]]:
    """Let a target continue texts greedily, all of them side by side.

    Args:
        target: the model.
        prompts: lists of at least one and at most ``length`` tokens.
        length: tokens of a text at the most, its prompt counted. A text ends before with one of
            the target's end tokens.

    Returns:
        Each prompt with what follows it.
    """
    texts = [list(prompt) for prompt in prompts]
    stop, draws = StopCondition(target.eos_ids), torch.Generator(target.device)
    waiting = []
    for number, text in enumerate(texts):
        if len(text) < length:
            prompt = torch.tensor(text, device=target.device)
            transcript = begin(prompt, length - len(text), target.max_positions, stop)
            waiting.append(DecodedSequence(number, prompt, transcript, draws))
    with torch.inference_mode():
        for ended in PlainEngine(target).decode(waiting, len(waiting), Sampling()):
            texts[ended.number] += ended.transcript.tokens
    return texts
