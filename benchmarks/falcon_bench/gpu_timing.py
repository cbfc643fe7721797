"""What loops take for a token on one prompt, in turns, the prompt's own reading left out.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.measure.measurement import Engine
from falcon_lab.sampling import Sampling
from falcon_lab.timing import Stopwatch, in_turns

PARTS = ("draft", "verify", "accept", "commit", "overhead")
OURS = ("accept", "commit", "overhead")
"""The parts of a round that are neither the target's pass nor the drafter's."""


@dataclass(frozen=True)
class Rate:
    """A loop on one prompt; medians over repeats.

    Attributes:
        tokens: new tokens.
        seconds: wall time of a token after the first.
        tau: tokens of a round, or None for a loop without rounds.
        round: seconds of each part of a round, or None.
        passes: drafter passes of a round.
        overhead: share of a round that is neither the target's pass nor the drafter's, in %.
    """

    tokens: int
    seconds: float
    tau: float | None = None
    round: dict[str, float] | None = None
    passes: float | None = None
    overhead: float | None = None

    @property
    def per_second(self) -> float:
        """Return tokens per second."""
        return 1 / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self) | {"tokens_per_second": self.per_second}


def rates(
    engines: Mapping[str, Engine],
    prompt: Tensor,
    tokens: int,
    *,
    repeats: int,
    reading: Engine,
    announce: Callable[[str], None],
) -> dict[str, Rate]:
    """Let engines write behind a prompt, in turns after a warm-up.

    Args:
        engines: by name; one with ``opaque = True`` is timed from outside alone.
        prompt: ``[P]`` long, on the device.
        tokens: new tokens, at least two.
        repeats: timed turns.
        reading: the time of its first token is taken for that of opaque engines, whose first token
            cannot be distinguished from the others.
        announce: is called with one line for the user at a time.
    """
    taken: dict[str, list[tuple[float, Generation]]] = {name: [] for name in engines}
    for name, engine in engines.items():
        announce(f"warming up: {name}")
        write(engine, prompt, tokens)
    first = 0.0
    if any(engine.opaque for engine in engines.values()):
        first = median(write(reading, prompt, 1)[0] for _ in range(repeats + 1))
    for _, name in in_turns(list(engines), repeats):
        taken[name].append(write(engines[name], prompt, tokens))
    return {name: _rate(taken[name], engines[name].opaque, first) for name in engines}


def write(engine: Engine, prompt: Tensor, tokens: int) -> tuple[float, Generation]:
    """Return the wall seconds of a text, and the text."""
    with Stopwatch(prompt.device) as watch:
        out = engine.generate(
            prompt,
            max_new_tokens=tokens,
            sampling=Sampling(),
            generator=torch.Generator(prompt.device).manual_seed(0),
            stop=StopCondition(),
        )
    return watch.wall, out


def _rate(taken: Sequence[tuple[float, Generation]], opaque: bool, first: float) -> Rate:
    tokens = len(taken[0][1].tokens)

    def each(wall: float, out: Generation) -> float:
        return (wall - (first if opaque else out.seconds.prefill)) / (tokens - 1)

    seconds = median(each(wall, out) for wall, out in taken)
    rounds = [done for _, out in taken for done in out.rounds]
    if opaque or not rounds:
        return Rate(tokens, seconds)
    split = {part: median(_part(out, part) for _, out in taken) for part in PARTS}
    return Rate(
        tokens,
        seconds,
        tau=(tokens - 1) * len(taken) / len(rounds),
        round=split,
        passes=sum(done.passes for done in rounds) / len(rounds),
        overhead=100 * sum(split[part] for part in OURS) / sum(split.values()),
    )


def _part(out: Generation, name: str) -> float:
    """Return the seconds that a part takes of a round."""
    return float(getattr(out.seconds, name)) / len(out.rounds)
