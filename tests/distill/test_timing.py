"""The clock of a step, on a clock of the test's own."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.distill.timing import StepClock

CPU = torch.device("cpu")


class Time:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    passing = Time()
    monkeypatch.setattr("time.perf_counter", passing)
    return passing


def test_each_part_gets_its_own_seconds(time: Time) -> None:
    clock = StepClock()
    time.now += 2
    clock.begin(CPU, wanted=True)
    for name, seconds in (("teacher", 3), ("student", 1), ("teacher", 4)):
        time.now += seconds
        clock.lap(name)
    time.now += 50  # nobody's
    clock.mark()
    assert clock.seconds == {"data": 2, "teacher": 7, "student": 1}


def test_a_step_begins_anew(time: Time) -> None:
    clock = StepClock()
    clock.begin(CPU, wanted=False)
    time.now += 1
    clock.lap("teacher")
    time.now += 5
    clock.begin(CPU, wanted=True)
    assert clock.seconds == {"data": 5}


def test_a_gpu_is_waited_for_in_steps_that_are_wanted_alone(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    clock, gpu = StepClock(), torch.device("cuda")
    clock.begin(gpu, wanted=False)
    clock.lap("teacher")
    assert waits == []
    clock.begin(gpu, wanted=True)
    clock.lap("teacher")
    assert waits == [gpu, gpu]
    clock.begin(CPU, wanted=True)
    clock.lap("teacher")
    assert len(waits) == 2
