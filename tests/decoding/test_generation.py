from __future__ import annotations

import time
from dataclasses import asdict

import pytest
import torch

from falcon_lab.decoding.generation import Clock


def test_every_lap_goes_to_its_part_and_the_total_leaves_the_prefill_out() -> None:
    clock = Clock(torch.device("cpu"))
    for part, pause in (("prefill", 0.02), ("draft", 0.01), ("verify", 0.005), ("draft", 0.01)):
        time.sleep(pause)
        clock.lap(part)  # type: ignore[arg-type]
    parts = asdict(clock.seconds)
    assert parts["prefill"] >= 0.02
    assert parts["draft"] >= 0.02
    assert parts["verify"] >= 0.005
    assert parts["accept"] == parts["commit"] == parts["overhead"] == 0
    assert parts["total"] == pytest.approx(parts["draft"] + parts["verify"])
