from __future__ import annotations

import json
from pathlib import Path

import pytest

from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.run import Run, flatten, refuse_changes, run_folder, training_facts


def silent(_: str) -> None:
    return None


def enter(folder: Path, *overrides: str) -> None:
    experiment = load_experiment(None, [f"out={folder}", *overrides])
    with Run.open(experiment, announce=silent):
        pass


def finish_training(folder: Path) -> None:
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text("{}")


def test_each_run_of_a_sweep_has_a_folder_of_its_own() -> None:
    experiment = Experiment(out="runs/csgd")
    assert run_folder(experiment, {}) == Path("runs/csgd")
    assert run_folder(experiment, {"WANDB_RUN_ID": "abc"}) == Path("runs/csgd")
    sweep = {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "abc"}
    assert run_folder(experiment, sweep) == Path("runs/csgd-abc")


def test_a_folder_is_let_go_of_when_its_run_ends(tmp_path: Path) -> None:
    experiment = load_experiment(None, [f"out={tmp_path}"])
    refused = pytest.raises(FalconLabError, match="another run is using this folder")
    with Run.open(experiment, announce=silent) as first, refused:
        enter(tmp_path)
    with Run.open(experiment, announce=silent) as second:
        assert first.folder == second.folder == tmp_path


def test_a_folder_is_let_go_of_when_its_run_fails(tmp_path: Path) -> None:
    experiment = load_experiment(None, [f"out={tmp_path}"])
    with pytest.raises(ZeroDivisionError), Run.open(experiment, announce=silent):
        raise ZeroDivisionError
    enter(tmp_path)


def test_the_configuration_is_written_down_as_one_that_loads(tmp_path: Path) -> None:
    enter(tmp_path, "drafter.block=3")
    assert load_experiment(tmp_path / "experiment.yaml").drafter["block"] == 3


def test_an_evaluation_does_not_overwrite_the_configuration_of_the_training(
    tmp_path: Path,
) -> None:
    enter(tmp_path, "name=first")
    enter(tmp_path, "name=second", "stages=[evaluate]")
    assert load_experiment(tmp_path / "experiment.yaml").name == "first"


def test_settings_may_change_until_there_is_something_trained(tmp_path: Path) -> None:
    enter(tmp_path, "drafter.block=2")
    enter(tmp_path, "drafter.block=3")
    finish_training(tmp_path)
    enter(tmp_path, "drafter.block=3")
    with pytest.raises(FalconLabError, match=r"drafter\.block=3, not 4; choose another folder"):
        enter(tmp_path, "drafter.block=4")
    assert json.loads((tmp_path / "training.json").read_text())["drafter.block"] == 3


def test_a_checkpoint_holds_a_folder_to_its_settings_too(tmp_path: Path) -> None:
    enter(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(FalconLabError, match="seed=0, not 1"):
        enter(tmp_path, "seed=1")


def test_without_the_settings_of_its_training_a_folder_is_held_to_its_experiment(
    tmp_path: Path,
) -> None:
    enter(tmp_path)
    finish_training(tmp_path)
    (tmp_path / "training.json").unlink()
    with pytest.raises(FalconLabError, match="seed=0, not 5"):
        enter(tmp_path, "seed=5")
    enter(tmp_path)
    (tmp_path / "training.json").unlink()
    (tmp_path / "experiment.yaml").unlink()
    with pytest.raises(FalconLabError, match=r"neither training\.json nor experiment\.yaml"):
        enter(tmp_path)


def test_damaged_settings_of_a_training_are_named(tmp_path: Path) -> None:
    enter(tmp_path)
    finish_training(tmp_path)
    for content in ("", "null", "[1]", "[" * 100_000):
        (tmp_path / "training.json").write_text(content)
        with pytest.raises(FalconLabError, match=r"training\.json: no settings of a training"):
            enter(tmp_path)


def test_an_experiment_that_no_run_wrote_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("name: mine  # with a remark\n")
    with pytest.raises(FalconLabError, match=r"experiment\.yaml: would be replaced"):
        enter(tmp_path)
    assert path.read_text() == "name: mine  # with a remark\n"
    enter(tmp_path, "stages=[evaluate]")
    assert path.read_text() == "name: mine  # with a remark\n"


@pytest.mark.parametrize("name", ["checkpoints", "drafter", "answers"])
def test_a_file_in_place_of_a_folder_is_named_before_anything_is_done(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(FalconLabError, match=rf"{name}: .*a file stands where a folder"):
        enter(tmp_path)
    assert [each.name for each in tmp_path.iterdir() if each.name != ".lock"] == [name]


@pytest.mark.parametrize(
    "harmless",
    [
        "evaluation.max_new_tokens=9",
        "tree.name=static",
        "trainer.enable_progress_bar=false",
        "distillation.decode_every=7",
        "distillation.logits_mib=16",
        "distillation.compile=true",
        "target.device=cpu",
        "name=other",
    ],
)
def test_what_the_drafter_does_not_depend_on_may_change(tmp_path: Path, harmless: str) -> None:
    enter(tmp_path)
    finish_training(tmp_path)
    enter(tmp_path, harmless)


def test_a_refusal_names_one_key_and_counts_the_others() -> None:
    before = {"a": 1, "b": 2, "c": 3, "gone": 4}
    refuse_changes(before, dict(before), Path("x"))
    with pytest.raises(FalconLabError, match=r"x: .*b=2, not 5 \(and 2 more keys\)"):
        refuse_changes(before, {"a": 1, "b": 5, "c": 6}, Path("x"))


def test_a_key_that_is_newer_than_the_run_stands_at_its_default() -> None:
    facts = training_facts(load_experiment(None))
    older = {k: v for k, v in facts.items() if k != "distillation.noise"}
    refuse_changes(older, facts, Path("x"))
    with pytest.raises(FalconLabError, match=r"distillation\.noise=0\.1, not 0\.3"):
        refuse_changes(older, facts | {"distillation.noise": 0.3}, Path("x"))


def test_facts_are_flat_and_hold_what_trains_a_drafter() -> None:
    facts = training_facts(load_experiment(None, ["drafter.block=3"]))
    assert facts["drafter.block"] == 3
    assert facts["distillation.optimizer.lr"] > 0
    assert not [key for key in facts if key.startswith(("evaluation", "tree", "wandb"))]
    assert json.loads(json.dumps(facts)) == facts


def test_mappings_are_flattened() -> None:
    assert dict(flatten({"a": {"b": 1, "c": {}}, "d": [1]}, "x")) == {
        "x.a.b": 1,
        "x.d": [1],
    }


def test_a_worker_takes_no_lock_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    experiment = load_experiment(None, [f"out={tmp_path}"])
    with Run.open(experiment, announce=silent) as current:
        assert current.is_worker
    assert list(tmp_path.iterdir()) == []


def test_without_results_the_report_says_what_to_do(tmp_path: Path) -> None:
    experiment = load_experiment(None, [f"out={tmp_path}"])
    with (
        Run.open(experiment, announce=silent) as current,
        pytest.raises(FalconLabError, match="run the stage evaluate first"),
    ):
        current.load_results()
