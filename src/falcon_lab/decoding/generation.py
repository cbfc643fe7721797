"""What decoding returns, and the clock that it is measured with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

from falcon_lab.decoding.stopping import Finish
from falcon_lab.interfaces import Acceptance
from falcon_lab.tree import TokenTree

OnRound = Callable[[list[int], int, TokenTree | None, Acceptance | None], None]
"""Called with the tokens that a round added (cut at the end of the text), how many of them were
drafted, and the tree with what was accepted of it. There is no tree for the first token, which the
prompt alone gives, nor in plain decoding."""


@dataclass(frozen=True, slots=True)
class Round:
    """One verification.

    Attributes:
        nodes: draft tokens in the tree.
        depth: longest path of draft tokens.
        passes: drafter passes.
        accepted: draft tokens among those emitted.
        emitted: tokens added to the text, correction or bonus token included. Only in the last
            round of a text that was cut is it not ``accepted + 1``.
        auxiliary: nodes that were verified and could not be accepted.
        layers: of the target that its passes went through, in drafting and verification; None where
            verification is all that the target does.
    """

    nodes: int
    depth: int
    passes: int
    accepted: int
    emitted: int
    auxiliary: int = 0
    layers: float | None = None


@dataclass(slots=True)
class Seconds:
    """Time of one generation: of the wall clock, on a GPU of the device's stream.

    Sequences that are decoded side by side share a round's time evenly, so that the times of all
    texts add up to the whole.

    Attributes:
        prefill: reading the prompt, by target and drafter, and the first token.
        draft: the drafter's passes.
        verify: target forward.
        accept: acceptance rule.
        commit: moving entries of the KV cache, the drafter's and the controller's update.
        overhead: tree building, the controller's decisions, the rest of the loop.
        total: of decoding, the prefill not counted.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    overhead: float = 0.0
    total: float = 0.0


Part = Literal["prefill", "draft", "verify", "accept", "commit", "overhead"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text.

    Attributes:
        tokens: new tokens, the ending one (end-of-sequence, or completing a stop string) included.
            The first comes from the prompt alone, so there are ``1 + Σ emitted`` of them.
        finish: why it ended.
        rounds: one for each verification (plain decoding: each step).
        seconds: where the time went.
    """

    tokens: list[int]
    finish: Finish
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)


class Mark(Protocol):
    """A moment in the work of a device: ``torch.cuda.Event``, or ``Moment`` on the host."""

    def synchronize(self) -> None:
        """Wait until the device has come so far."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds to a later mark."""
        ...


class Moment:
    """A mark by the host's own clock."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = perf_counter()

    def synchronize(self) -> None:
        """Return at once: the host has come so far."""

    def elapsed_time(self, end_event: Moment) -> float:
        """Return the milliseconds to a later moment."""
        return 1000 * (end_event.at - self.at)


class Laps:
    """Measured stretches of time, each a part of decoding."""

    def __init__(self) -> None:
        self.listed: list[tuple[Part, Mark, Mark]] = []

    def add_to(self, seconds: Seconds, share: float) -> None:
        """Add a share of every lap; this waits for the device."""
        if self.listed:
            self.listed[-1][2].synchronize()
        for part, before, after in self.listed:
            taken = share * before.elapsed_time(after) / 1000
            setattr(seconds, part, getattr(seconds, part) + taken)
            if part != "prefill":
                seconds.total += taken


class PhaseClock:
    """Measures the parts of decoding without ever waiting for a device.

    On a GPU a lap is what passes in the device's own stream between two events, its waiting for
    the host included; the laps of a stretch add up to the whole of it.

    Args:
        mark: marks the moment that the device comes to after all that it was given so far.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._laps = Laps()
        self._last = mark()

    @classmethod
    def on(cls, device: torch.device) -> PhaseClock:
        """Make the clock of a loop that one device works for."""
        if device.type != "cuda":
            return cls(Moment)

        def mark() -> Mark:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            return event

        return cls(mark)

    def start(self) -> None:
        """Leave out the time since the last lap."""
        self._last = self._mark()

    def lap(self, part: Part) -> None:
        """Count the time since the last lap as that part's."""
        before, self._last = self._last, self._mark()
        self._laps.listed.append((part, before, self._last))

    def take(self) -> Laps:
        """Return the laps since they were last taken."""
        laps, self._laps = self._laps, Laps()
        return laps
