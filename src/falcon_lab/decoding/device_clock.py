"""A clock that never waits: marks in the device's own stream, looked at when all is done.

A part's time is then what passed on the device between two marks, its waiting for the host
included; the parts add up to the time from the first mark to the last.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch

from falcon_lab.decoding.generation import Clock, Part, Seconds


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
