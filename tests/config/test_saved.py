from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.load import load_experiment
from falcon_lab.config.saved import bench_experiment, decoding_experiment, saved_experiment
from falcon_lab.errors import ConfigError, FalconLabError


@pytest.fixture(autouse=True)
def _built_ins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")


def saved(folder: Path, target: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    provenance = {"name": "falcon", "distribution": "falcon-lab", "version": "0"}
    known = {"format": 1, "drafter": {"name": "falcon"}, "provenance": provenance}
    described = known | {"target": {"fingerprint": "0", **target}}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def test_nothing_in_a_strangers_files_is_interpolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASS", "secret")
    for name in ("${oc.env:MY_PASS}", "\\${oc.env:MY_PASS}", "${seed}"):
        folder = saved(tmp_path / str(len(name)) / "drafter", {"name": name})
        assert decoding_experiment(folder, []).target.name == name
        facts = {"target.name": name}
        (folder.parent / "training.json").write_text(json.dumps(facts))
        assert decoding_experiment(folder, []).target.name == name


def test_a_strangers_experiment_asks_nothing_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_PASS", "secret")
    path = tmp_path / "experiment.yaml"
    path.write_text("name: hers\nreport: {title: '${name} and \\${oc.env:MY_PASS}'}\n")
    assert saved_experiment(tmp_path, []).report.title == "hers and ${oc.env:MY_PASS}"
    path.write_text("name: hers\nreport:\n  title: ${oc.env:MY_PASS}\n")
    with pytest.raises(
        ConfigError, match=r"experiment\.yaml:3: report\.title: .*asks this machine"
    ):
        saved_experiment(tmp_path, [])
    # One's own experiment may.
    assert load_experiment(path).report.title == "secret"


def test_a_shared_drafter_brings_the_name_of_its_target(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", {"name": "org/model: 7b", "revision": None})
    target = decoding_experiment(folder, []).target
    assert (target.name, target.revision, target.pretraining) == ("org/model: 7b", None, None)


def test_a_drafter_in_a_runs_folder_brings_the_whole_target(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run" / "drafter", {"name": "mine"})
    facts = {"target.name": "mine", "target.pretraining.steps": 7, "target.dtype": "float64"}
    (folder.parent / "training.json").write_text(json.dumps({**facts, "data.length": 3}))
    experiment = decoding_experiment(folder, [])
    assert experiment.target.dtype == "float64"
    assert experiment.target.pretraining is not None
    assert experiment.target.pretraining.steps == 7
    assert experiment.data.length == 256


def test_what_the_user_says_wins(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", {"name": "one"})
    experiment = decoding_experiment(folder, ["target.name=two", "tree.depth=9"])
    assert (experiment.target.name, experiment.tree["depth"]) == ("two", 9)
    with pytest.raises(ConfigError, match=r"tree\.dept: unknown key"):
        decoding_experiment(folder, ["tree.dept=9"])


def test_a_target_given_by_name_replaces_the_recipe_and_the_revision(tmp_path: Path) -> None:
    folder = saved(tmp_path / "run" / "drafter", {"name": "mine"})
    facts = {"target.name": "mine", "target.revision": "v2", "target.pretraining.steps": 7}
    (folder.parent / "training.json").write_text(json.dumps(facts))
    other = decoding_experiment(folder, ["target.name=gpt2"]).target
    assert (other.name, other.revision, other.pretraining) == ("gpt2", None, None)
    same = decoding_experiment(folder, ["target.name=mine"]).target
    assert same.revision == "v2"
    assert same.pretraining is not None
    rows = bench_experiment(folder, ["chain"], ["target.name=gpt2"])
    assert rows.target.pretraining is None


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_folder_without_a_description_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(FalconLabError, match=rf"{tmp_path}.*config\.json"):
        decoding_experiment(tmp_path, [])


def test_an_overridden_tree_is_the_experiments_own_and_no_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", {"name": "one"})
    own = ["tree.name=static", "tree.template=k2-8"]
    found = bench_experiment(folder, ["chain,depth=3", "static"], own)
    rows = {name: row.tree for name, row in found.evaluation.methods.items()}
    assert found.tree["template"] == "k2-8"
    assert (rows["chain depth=3"] or {})["depth"] == 3
    assert (rows["static"] or {})["template"] == "auto"
    shared = bench_experiment(folder, ["chain"], ["tree.depth=7"]).evaluation.methods
    assert (shared["chain"].tree or {})["depth"] == 7


def test_a_tree_in_a_file_brings_its_controller(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", {"name": "one"})
    file = tmp_path / "tuned.yaml"
    controller = "controller: {name: confidence, threshold: 0.4}"
    file.write_text(f'tree: {{name: static, template: ["0", "1"]}}\n{controller}\n')
    rows = bench_experiment(folder, [str(file), "chain"], []).evaluation.methods
    assert (rows[str(file)].tree or {})["template"] == ["0", "1"]
    assert (rows[str(file)].controller or {})["threshold"] == 0.4
    assert rows["chain"].controller is None


def test_a_folder_does_not_say_where_its_evaluation_is_sent(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("wandb: {mode: online, entity: them, project: p}")
    found = saved_experiment(tmp_path, []).wandb
    assert (found.mode, found.entity, found.project) == (None, None, "p")
    assert saved_experiment(tmp_path, ["wandb.mode=online"]).wandb.mode == "online"


def test_a_tree_that_is_called_as_the_baseline_does_not_take_its_row(tmp_path: Path) -> None:
    folder = saved(tmp_path / "drafter", {"name": "one"})
    with pytest.raises(FalconLabError, match="--tree plain"):
        bench_experiment(folder, ["plain"], [])
