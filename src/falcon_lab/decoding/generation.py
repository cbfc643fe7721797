"""What decoding returns, and the clock that it is measured with.

A clock that never waits: marks in the device's own stream, looked at when all is done.

A part's time is then what passed on the device between two marks, its waiting for the host
included; the parts add up to the time from the first mark to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Literal, Protocol

import torch

from falcon_lab.decoding.stopping import Finish, StopCondition
from falcon_lab.interfaces import Acceptance
from falcon_lab.tree import TokenTree

__all__ = ["Clock", "Finish", "Generation", "OnRound", "Round", "Seconds", "StopCondition"]

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
    """

    nodes: int
    depth: int
    passes: int
    accepted: int
    emitted: int
    auxiliary: int = 0


@dataclass(slots=True)
class Seconds:
    """Time of one generation, by the wall clock; on a GPU by its own (``device_clock.py``).

    Attributes:
        prefill: reading the prompt, by target and drafter, and the first token.
        draft: the drafter's passes.
        verify: target forward.
        accept: acceptance rule.
        commit: moving cache rows, the drafter's and the controller's update.
        overhead: tree building, the controller's questions, the rest of the loop.
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


class Clock:
    """Fills ``seconds``, lap by lap.

    Args:
        device: waited for before a lap is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds = Seconds()
        self._cuda = device if device.type == "cuda" else None
        self._last = self._now()

    def lap(self, part: Part) -> None:
        """The time since the last lap went into ``part``."""
        before, self._last = self._last, self._now()
        taken = self._last - before
        setattr(self.seconds, part, getattr(self.seconds, part) + taken)
        if part != "prefill":
            self.seconds.total += taken

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return perf_counter()


class Mark(Protocol):
    """A moment of a device: ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until the device has come so far."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to a later mark."""
        ...


class DeviceClock:
    """Fills ``seconds``, lap by lap, as ``Clock`` does.

    Args:
        mark: marks the moment which the device comes to after all that it was given so far.
    """

    def __init__(self, mark: Callable[[], Mark]) -> None:
        self._mark = mark
        self._marks = [mark()]
        self._parts: list[Part] = []

    def lap(self, part: Part) -> None:
        """The time since the last lap went into ``part``."""
        self._parts.append(part)
        self._marks.append(self._mark())

    @property
    def seconds(self) -> Seconds:
        """Of all laps so far; this waits for the device."""
        found = Seconds()
        self._marks[-1].synchronize()
        for part, (before, after) in zip(self._parts, pairwise(self._marks), strict=True):
            taken = before.elapsed_time(after) / 1000
            setattr(found, part, getattr(found, part) + taken)
            if part != "prefill":
                found.total += taken
        return found


def clock_for(device: torch.device) -> Clock | DeviceClock:
    """The clock of a loop that one device works for."""
    if device.type != "cuda":
        return Clock(device)

    def mark() -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceClock(mark)
