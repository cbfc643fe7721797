"""The stopwatch, on a clock of the test's own, and the rotation of turns."""

from __future__ import annotations

import pytest
import torch

from fakes.clock import Clock
from falcon_lab.timing import Stopwatch, fastest, in_turns, rotated, synchronize, torch_threads

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Clock:
    passing = Clock()
    monkeypatch.setattr("time.perf_counter", passing)
    return passing


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Clock:
    passing = Clock()
    monkeypatch.setattr("time.process_time", passing)
    return passing


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    found: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def test_a_block_is_measured_on_both_clocks(wall: Clock, cpu: Clock) -> None:
    with Stopwatch() as watch:
        wall.now += 3
        cpu.now += 2
    wall.now += 50  # nobody's
    assert (watch.wall, watch.cpu) == (3, 2)


def test_a_lap_begins_where_the_last_one_ended(wall: Clock, cpu: Clock) -> None:
    watch = Stopwatch()
    wall.now += 1
    cpu.now += 4
    assert watch.lap() == 1
    assert watch.cpu == 4
    wall.now += 2
    assert (watch.lap(), watch.cpu) == (2, 0)
    wall.now += 50
    watch.start()
    wall.now += 3
    assert watch.lap() == 3


def test_a_gpu_is_waited_for_at_every_reading(waits: list[torch.device]) -> None:
    watch = Stopwatch(GPU)
    assert waits == [GPU]
    with watch:
        assert waits == [GPU] * 2
    assert waits == [GPU] * 3


def test_the_host_and_a_cpu_are_not_waited_for(waits: list[torch.device]) -> None:
    for device in (None, CPU):
        synchronize(device)
        Stopwatch(device).lap()
    assert waits == []


def test_items_are_counted_round() -> None:
    assert [rotated("abc", by) for by in (0, 1, 5, -1)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["c", "a", "b"],
    ]
    assert rotated([], 3) == []


def test_every_repeat_begins_with_the_next_item() -> None:
    taken = list(in_turns("ab", 2, warm_up=1))
    assert [repeat for repeat, _ in taken] == [-1, -1, 0, 0, 1, 1]
    assert [item for repeat, item in taken if repeat >= 0] == ["a", "b", "b", "a"]
    assert {item for repeat, item in taken if repeat < 0} == {"a", "b"}


def test_the_best_sample_counts(wall: Clock) -> None:
    costs = [3.0, 2.0]  # then 1 s for every call

    def call() -> None:
        wall.now += costs.pop(0) if costs else 1.0

    assert fastest(call, CPU, seconds=3.5) == 1.0


def test_threads_are_set_for_the_time_being() -> None:
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        with torch_threads(None):
            assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
