"""Threads: what is tried, what is timed, and which of them are taken."""

from __future__ import annotations

import pytest
import torch

from falcon_lab.studies.tune import measuring as threads
from falcon_lab.studies.tune.measuring import (
    ThreadCost,
    choose_threads,
    doubling,
    fastest,
    time_threads,
)
from tiny_models import tiny_target


@pytest.mark.parametrize(
    ("cores", "counts"), [(0, [1]), (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, counts: list[int]) -> None:
    assert doubling(cores) == counts


def test_the_cheapest_is_taken_and_of_two_alike_the_one_with_fewer_threads() -> None:
    costs = [ThreadCost(4, 1.0, 2.0), ThreadCost(1, 2.0, 3.0), ThreadCost(2, 1.5, 1.5)]
    assert fastest(costs).threads == 2


def test_passes_run_with_the_threads_that_they_are_timed_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "ROUNDS", 2)
    target, before = tiny_target("llama"), torch.get_num_threads()
    seen: set[tuple[int, int]] = set()
    forward = type(target.backbone).forward

    def watched(self: object, **given: torch.Tensor) -> torch.Tensor:
        seen.add((torch.get_num_threads(), given["tokens"].shape[1]))
        hidden: torch.Tensor = forward(self, **given)  # type: ignore[arg-type]
        return hidden

    monkeypatch.setattr(type(target.backbone), "forward", watched)
    costs = time_threads(target, [1, 2], nodes=3)
    assert [cost.threads for cost in costs] == [1, 2]
    assert {(1, 1), (1, 3), (2, 1), (2, 3)} <= seen
    assert all(cost.step > 0 and cost.verify > 0 for cost in costs)
    assert torch.get_num_threads() == before


def test_the_choice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(
        threads, "time_threads", lambda *_: [ThreadCost(1, 2e-3, 8e-3), ThreadCost(2, 2e-3, 6e-3)]
    )
    said: list[str] = []
    assert choose_threads(tiny_target("llama"), said.append) == 2
    assert said == [
        "threads, a step and 8 nodes: 1: 2.00 and 8.00 ms, 2: 2.00 and 6.00 ms; taking 2"
    ]
