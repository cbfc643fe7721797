"""Measure the peak memory of a call."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from falcon_lab.timing import synchronize

PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Peak:
    """Bytes.

    Attributes:
        before: in use when the call began.
        highest: in use at the highest point.
        growth: the difference.
    """

    before: int
    highest: int
    growth: int

    @classmethod
    def between(cls, before: int, highest: int) -> Self:
        """Make the record of two readings, in bytes."""
        return cls(before, highest, max(0, highest - before))


def peak_of(call: Callable[[], object], device: torch.device) -> Peak | None:
    """Run ``call`` and watch torch's memory on a GPU, the process's resident set on a CPU.

    None where the system does not report it (Linux's ``clear_refs`` is needed).
    """
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        synchronize(device)
        return Peak.between(before, torch.cuda.max_memory_allocated(device))
    if not (PROCESS / "clear_refs").exists():
        return None
    _give_back()
    if not _forget_peak():
        return None
    before = _resident("VmRSS")
    call()
    return Peak.between(before, _resident("VmHWM"))


def _give_back() -> None:
    """Return freed memory to the system, so that taking it again shows (glibc alone can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _forget_peak() -> bool:
    try:
        (PROCESS / "clear_refs").write_text("5")  # proc(5): resets VmHWM to VmRSS
    except OSError:
        return False
    return True


def _resident(key: str) -> int:
    for line in (PROCESS / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0
