from __future__ import annotations

from pathlib import Path

import pytest
import torch

from falcon_lab.studies.bench import memory
from falcon_lab.studies.bench.memory import Peak, peak_of

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system does not tell"
)


def take(mib: int) -> None:
    torch.ones(mib * 2**18)  # touched, then freed


@LINUX
def test_memory_that_was_freed_again_is_seen_at_its_highest_point() -> None:
    found = peak_of(lambda: take(64), CPU)
    assert found is not None
    assert found.growth >= 60 * 2**20
    assert found.growth == found.highest - found.before


@LINUX
def test_one_peak_does_not_hide_behind_an_earlier_one() -> None:
    large, small = peak_of(lambda: take(96), CPU), peak_of(lambda: take(8), CPU)
    assert large is not None
    assert small is not None
    assert small.growth < 48 * 2**20 < large.growth


def test_where_the_system_does_not_tell_there_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROCESS", tmp_path)
    assert peak_of(lambda: take(1), CPU) is None


def test_a_peak_below_the_beginning_is_no_growth() -> None:
    assert Peak.between(10, 7).growth == 0
    assert Peak.between(7, 10).growth == 3
