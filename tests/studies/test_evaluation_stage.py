"""The stage as a whole is run by tests/test_experiments.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.measure.results import build_results
from falcon_lab.model.loading import resolve_device
from falcon_lab.studies import evaluate as stage
from measuring import EXPERIMENT, HEADER, TARGET, measurement, prompt


@pytest.mark.parametrize(
    ("name", "gpu", "expected"),
    [
        ("auto", True, "cuda"),
        ("auto", False, "cpu"),
        ("cpu", True, "cpu"),
        ("cuda:1", False, "cuda:1"),
    ],
)
def test_the_device_of_the_evaluation(
    name: str, gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(name) == torch.device(expected)


def test_without_a_speculative_method_no_tree_is_drawn() -> None:
    nothing: Any = None
    assert stage.drawn_trees(nothing, {}, prompt("p", "a"), None) == []


def test_every_methods_answers_are_written(tmp_path: Path) -> None:
    results = build_results(measurement(2), experiment=EXPERIMENT, target=TARGET, header=HEADER)
    stage.save_answers(tmp_path / "answers", ["plain", "chain", "tree"], results)
    assert sorted(path.name for path in (tmp_path / "answers").iterdir()) == [
        "chain.jsonl",
        "plain.jsonl",
        "tree.jsonl",
    ]
    for file in (tmp_path / "answers").iterdir():
        answers = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        assert {answer["model_id"] for answer in answers} == {file.stem}
        assert len(answers) == 2
