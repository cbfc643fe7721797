from __future__ import annotations

import time
from dataclasses import asdict

import pytest
import torch

from falcon_lab.decoding.generation import Laps, PhaseClock, Seconds


def seconds_of(laps: Laps, share: float = 1.0) -> Seconds:
    found = Seconds()
    laps.add_to(found, share)
    return found


def test_every_lap_goes_to_its_part_and_the_total_leaves_the_prefill_out() -> None:
    clock = PhaseClock.on(torch.device("cpu"))
    for part, pause in (("prefill", 0.02), ("draft", 0.01), ("verify", 0.005), ("draft", 0.01)):
        time.sleep(pause)
        clock.lap(part)  # type: ignore[arg-type]
    parts = asdict(seconds_of(clock.take()))
    assert parts["prefill"] >= 0.02
    assert parts["draft"] >= 0.02
    assert parts["verify"] >= 0.005
    assert parts["accept"] == parts["commit"] == parts["overhead"] == 0
    assert parts["total"] == pytest.approx(parts["draft"] + parts["verify"])


class Event:
    """Of a device whose moments are a list."""

    waited = 0

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_laps_are_the_times_between_events_and_are_waited_for_at_the_end() -> None:
    moments = iter([10.0, 25.0, 26.0, 30.0, 37.0, 100.0, 101.0])
    clock = PhaseClock(lambda: Event(next(moments)))
    for part in ("prefill", "draft", "verify", "draft"):
        clock.lap(part)  # type: ignore[arg-type]
    laps = clock.take()
    assert Event.waited == 0
    seconds = seconds_of(laps)
    assert Event.waited == 1
    assert seconds.prefill == pytest.approx(0.015)
    assert seconds.draft == pytest.approx(0.008)
    assert seconds.verify == pytest.approx(0.004)
    assert seconds.total == pytest.approx(0.012)
    assert seconds_of(laps, 0.25).draft == pytest.approx(0.002)
    clock.start()  # what was before is nobody's
    clock.lap("verify")
    assert seconds_of(clock.take()).total == pytest.approx(0.001)
