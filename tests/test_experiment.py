from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab import experiment
from falcon_lab.config.load import load_experiment
from falcon_lab.config.saved import saved_experiment
from falcon_lab.config.schema import STAGES
from falcon_lab.errors import FalconLabError
from falcon_lab.run import Run, keep_to_one_device

Called = list[tuple[str, bool]]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Called:
    """Stages that only write down that they were called, and whether they were wanted."""
    found: Called = []

    def stage(name: str) -> Any:
        return lambda current, wanted: found.append((name, wanted))

    monkeypatch.setattr(experiment, "STAGE", {name: stage(name) for name in STAGES})
    monkeypatch.setattr(experiment, "CHECK", {})
    return found


def test_the_stages_are_those_of_the_schema_in_its_order() -> None:
    assert tuple(experiment.STAGE) == STAGES
    assert all(inspect.getdoc(stage) for stage in experiment.STAGE.values())


def test_every_stage_is_announced_and_run_in_order(called: Called, tmp_path: Path) -> None:
    lines: list[str] = []
    experiment.run(load_experiment(None, [f"out={tmp_path}"]), announce=lines.append)
    assert called == [(name, True) for name in STAGES]
    assert lines == [f"— {name}" for name in STAGES]


def test_only_wanted_stages_are_announced(called: Called, tmp_path: Path) -> None:
    lines: list[str] = []
    chosen = load_experiment(None, [f"out={tmp_path}", "stages=[report, target]"])
    experiment.run(chosen, announce=lines.append)
    assert [name for name, wanted in called if wanted] == ["target", "report"]
    assert lines == ["— target", "— report"]


def test_a_worker_leaves_after_the_training_and_says_nothing(
    called: Called, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    lines: list[str] = []
    experiment.run(load_experiment(None, [f"out={tmp_path}"]), announce=lines.append)
    assert [name for name, _ in called] == ["target", "data", "distil"]
    assert lines == []


@pytest.mark.parametrize("devices", [2, "auto", -1, [0, 1]])
def test_several_trainings_are_refused_several_devices(devices: Any) -> None:
    chosen = load_experiment(None, [f"trainer.devices={devices}"])
    with pytest.raises(FalconLabError, match=r"trainer\.devices is"):
        keep_to_one_device(chosen)


@pytest.mark.parametrize("given", [[], ["trainer.devices=1"], ["trainer.devices=[3]"]])
def test_several_trainings_are_given_one_device(given: list[str]) -> None:
    chosen = load_experiment(None, given)
    keep_to_one_device(chosen)
    assert chosen.trainer["devices"] in (1, [3])


def test_several_trainings_are_refused_under_a_launcher_of_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FalconLabError, match="one device"):
        keep_to_one_device(load_experiment(None, []))


def test_a_runs_folder_is_measured_as_its_own_experiment_says(tmp_path: Path) -> None:
    chosen = load_experiment(None, [f"out={tmp_path}", "name=mine", "drafter.block=3"])
    with Run.open(chosen, announce=lambda _: None):
        pass
    for folder in (tmp_path, tmp_path / "drafter"):
        found = saved_experiment(folder, ["evaluation.max_new_tokens=5"])
        assert (found.name, found.drafter["block"]) == ("mine", 3)
        assert found.stages == ["evaluate", "report"]
        assert Path(found.out) == tmp_path
        assert found.evaluation.max_new_tokens == 5


def test_a_shared_drafter_is_measured_in_a_folder_of_its_own(tmp_path: Path) -> None:
    description = {
        "format": 1,
        "drafter": {"name": "falcon"},
        "provenance": {"name": "falcon", "distribution": "falcon-lab"},
        "target": {"name": "org/model", "revision": "abc", "fingerprint": "f"},
    }
    (tmp_path / "config.json").write_text(json.dumps(description))
    found = saved_experiment(tmp_path, [])
    assert (found.target.name, found.target.revision) == ("org/model", "abc")
    assert found.out == f"runs/evaluate-{tmp_path.name}"
    assert set(found.evaluation.methods) == {"chain", "tree"}
    assert found.evaluation.methods["tree"].drafter_path == str(tmp_path)


def test_a_folder_with_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FalconLabError, match="no saved drafter here"):
        saved_experiment(tmp_path, [])
