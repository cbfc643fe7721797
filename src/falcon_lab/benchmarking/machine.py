"""What this machine can do: how fast it copies memory and how fast it multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch

MIB = 2**20

COPIED = {"cpu": (MIB, 512 * MIB), "cuda": (256 * MIB, 1024 * MIB)}
"""Device -> least and most bytes that a copy reads and writes. On a GPU less would time the launch
of the kernel."""

SIDE = {"cpu": 1024, "cuda": 8192}
"""Device -> rows and columns of the matrices."""


@dataclass(frozen=True)
class Machine:
    """What was measured.

    Attributes:
        bytes_per_second: of a copy; a byte that is read and written counts twice.
        copied_bytes: what one copy read and wrote.
        operations_per_second: of a matrix product; a multiplication and an addition are two.
        matrix_side: rows and columns of its matrices.
        dtype: of the matrices.
    """

    bytes_per_second: float
    copied_bytes: int
    operations_per_second: float
    matrix_side: int
    dtype: str


def measure_machine(
    device: torch.device, dtype: torch.dtype, working_set: int, *, seconds: float = 0.5
) -> Machine:
    """Measure with the threads that are set, ``seconds`` for each figure.

    Args:
        device: where.
        dtype: of the matrices.
        working_set: bytes that the work in question moves. A copy as large sees the same caches:
            a model that fits into one is not bound by the memory behind it.
        seconds: time for each of the two.
    """
    least, most = COPIED.get(device.type, COPIED["cuda"])
    copied = min(max(working_set, least), most) // 8 * 8
    source = torch.ones(copied // 8, device=device)  # 4 bytes each, read here and written there
    goal = torch.empty_like(source)
    copy = fastest(lambda: goal.copy_(source), device, seconds=seconds)
    side = SIDE.get(device.type, SIDE["cuda"])
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(left)
    product = fastest(lambda: torch.mm(left, right, out=out), device, seconds=seconds)
    return Machine(copied / copy, copied, 2 * side**3 / product, side, str(dtype))


def fastest(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Seconds of one call: the best of many samples, each long enough for the clock."""

    def sample(count: int) -> float:
        _wait(device)
        started = perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        return (perf_counter() - started) / count

    call()
    best = sample(1)
    count = max(1, int(0.005 / best))
    end = perf_counter() + seconds
    while perf_counter() < end:
        best = min(best, sample(count))
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
