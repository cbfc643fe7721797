from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter

import pytest
import torch

from falcon_lab.studies.bench import machine
from falcon_lab.studies.bench.machine import MIB, measure_machine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.SIDE, "cpu", 64)


def seconds_of(call: Callable[[], object]) -> float:
    """The best of some calls."""
    best = inf
    for _ in range(200):
        started = perf_counter()
        call()
        best = min(best, perf_counter() - started)
    return best


@pytest.mark.parametrize(
    ("working_set", "copied"), [(1, MIB), (3 * MIB, 3 * MIB), (10**15, 512 * MIB)]
)
def test_a_copy_is_as_large_as_the_work_within_limits(
    working_set: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if copied > 4 * MIB:
        monkeypatch.setitem(machine.COPIED, "cpu", (MIB, 4 * MIB))
        copied = 4 * MIB
    found = measure_machine(CPU, torch.float32, working_set, seconds=0.001)
    assert found.copied_bytes == copied


def test_both_rates_are_those_of_the_best_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "fastest", lambda call, device, *, seconds: 0.5)
    found = measure_machine(CPU, torch.float64, 2 * MIB)
    assert found.bytes_per_second == 4 * MIB
    assert found.operations_per_second == 2 * 2 * 64**3
    assert (found.matrix_side, found.dtype) == (64, "torch.float64")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rates_are_those_that_a_clock_beside_them_finds(dtype: torch.dtype) -> None:
    found = measure_machine(CPU, dtype, MIB, seconds=0.02)
    source, goal = torch.ones(MIB // 8), torch.empty(MIB // 8)
    square = torch.ones(64, 64, dtype=dtype)
    copy = seconds_of(lambda: goal.copy_(source))
    product = seconds_of(lambda: torch.mm(square, square))
    # Units are distinguished, not machines: the clocks run one after the other, on a busy machine
    # too.
    assert 1 / 20 < found.bytes_per_second / (MIB / copy) < 20
    assert 1 / 20 < found.operations_per_second / (2 * 64**3 / product) < 20
