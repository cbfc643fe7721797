"""Times from marks on a device, which a list of moments stands in for."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.decoding.generation import Clock, DeviceClock, clock_for


class Moment:
    waited = 0

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        Moment.waited += 1

    def elapsed_time(self, end: Moment) -> float:
        return end.at - self.at


def test_laps_are_the_times_between_marks_and_are_waited_for_at_the_end() -> None:
    moments = iter([10.0, 25.0, 26.0, 30.0, 37.0])
    clock = DeviceClock(lambda: Moment(next(moments)))
    for part in ("prefill", "draft", "verify", "draft"):
        clock.lap(part)  # type: ignore[arg-type]
    assert Moment.waited == 0
    seconds = clock.seconds
    assert Moment.waited == 1
    assert seconds.prefill == pytest.approx(0.015)
    assert seconds.draft == pytest.approx(0.008)
    assert seconds.verify == pytest.approx(0.004)
    assert seconds.total == pytest.approx(0.012)


def test_a_cpu_has_the_wall_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), Clock)
