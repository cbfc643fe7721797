"""The stage as a whole is run by tests/test_experiments.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from everything import everything
from falcon_lab.config.schema import EvaluationConfig, Experiment, MethodConfig, PromptsConfig
from falcon_lab.files import read_lines
from falcon_lab.measure.journal import Journal
from falcon_lab.measure.results import build_results
from falcon_lab.model.loading import resolve_device
from falcon_lab.studies import evaluate as stage
from measuring import EXPERIMENT, HEADER, TARGET, measurement, prompt
from tiny_models import tiny_target


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


LOOKUP = {"name": "lookup"}


def test_a_killed_evaluation_goes_on_and_a_finished_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = MethodConfig(drafter=LOOKUP, tree={"name": "chain", "depth": 2})
    evaluation = EvaluationConfig(
        prompts=PromptsConfig(texts=["one", "two", "three"]),
        max_new_tokens=4,
        repeats=1,
        warmup=0,
        hf_generate=False,
        methods={"looked up": method},
    )
    experiment = Experiment(stages=["evaluate"], evaluation=evaluation)
    asked: list[str] = []
    add = Journal.add

    def noted(self: Journal, repeat: int, prompt: str, method: str, turns: Any) -> None:
        add(self, repeat, prompt, method, turns)
        asked.append(prompt)
        if len(asked) == 3:  # after one method's answer to the second prompt
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", noted)

    def run() -> tuple[dict[str, Any], int]:
        before = len(asked)
        found = stage.evaluate_methods(
            experiment,
            tiny_target(),
            everything(),
            tmp_path,
            trained=tmp_path / "drafter",
            announce=lambda line: None,
        )
        return found, len(asked) - before

    with pytest.raises(KeyboardInterrupt):
        run()
    [journal] = (tmp_path / "rows").iterdir()
    walls = [line["turns"][0]["times"]["wall"] for line in read_lines(journal) if "turns" in line]
    results, answered = run()
    assert answered == 4  # two methods, the second and the third prompt
    measured = [row["wall_repeats"][0] for row in results["rows"] if row["prompt"] == asked[0]]
    assert sorted(measured) == sorted(walls[:2])
    assert not (tmp_path / "rows").exists()
    assert run()[1] == 6


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
