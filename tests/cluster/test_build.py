"""An experiment's data by a cluster: a stand-in for Ray's part, workers that write for real."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fakes.ray import FakeRay
from falcon_lab.cli import main
from falcon_lab.cluster import worker
from falcon_lab.config.load import load_experiment
from falcon_lab.data import feature_store, regeneration
from falcon_lab.experiment import run
from tiny_models import save_tiny

WORDS = (
    *("target.name=target", "data.length=24", "data.documents=5", "data.validation=1"),
    *("data.batch_size=2", "data.regenerate=1", "data.feature_store=store", "drafter.block=2"),
)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target; a unit is two texts or two sequences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(regeneration, "PART", 2)
    monkeypatch.setattr(feature_store, "SHARD_BYTES", 2 * 24 * 4 * 33)
    save_tiny(tmp_path / "target", vocab=300, hidden=32)
    (tmp_path / "e.yaml").write_text("name: e\n")
    return tmp_path


def data(monkeypatch: pytest.MonkeyPatch, ray: Any, *words: str) -> Any:
    monkeypatch.setitem(sys.modules, "ray", ray)
    arguments = words or ("--ray", "local", "--actors", "2")
    return CliRunner().invoke(main, ["data", "e.yaml", *WORDS, *arguments])


def written(work: Path) -> dict[str, bytes]:
    """All that data are made of, by name."""
    found = [*(work / "store").rglob("*"), *(work / "cache" / "texts").rglob("*")]
    return {str(path.relative_to(work)): path.read_bytes() for path in found if path.is_file()}


def by_one_process(work: Path) -> dict[str, bytes]:
    """What a run writes, which is moved away."""
    run(load_experiment(None, [*WORDS, "stages=[target,data]", "out=run"]), announce=print)
    found = written(work)
    for name in found:
        (work / name).unlink()
    return found


def test_what_a_cluster_writes_is_what_one_process_writes_whoever_dies(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = by_one_process(work)
    assert len([name for name in expected if "features-" in name]) > 3
    for wrote in (False, True):
        ray = FakeRay(2, None, wrote=wrote)
        result = data(monkeypatch, ray)
        assert result.exit_code == 0, result.output
        assert "actor 1 has died while it wrote texts" in result.output
        assert "1 go on" in result.output
        assert written(work) == expected
        assert not ray.is_up
        for name in written(work):
            (work / name).unlink()


def test_the_same_command_writes_what_is_missing_alone(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody_dies = data(monkeypatch, FakeRay(1, 5))
    assert everybody_dies.exit_code == 2
    assert "actor 2 has died while it wrote features" in everybody_dies.output
    assert "it was the last one" in everybody_dies.output
    ray = FakeRay()
    again = data(monkeypatch, ray)
    assert again.exit_code == 0, again.output
    assert "texts: 0 units" in again.output
    assert "features: 0 units" not in again.output
    assert sum(each.units for each in ray.actors) < 5
    finished = written(work)
    assert "features: 0 units" in data(monkeypatch, FakeRay()).output
    assert written(work) == finished


@pytest.mark.parametrize(
    ("ray", "words", "said"),
    [
        (None, ("--ray", "local"), r"falcon-lab\[ray\]"),
        (FakeRay(), ("--ray", "elsewhere"), "no address of a cluster"),
        (FakeRay(), ("--ray", "127.0.0.1:1"), "no cluster answers"),
        (FakeRay(refusal=ConnectionError("none\nthere")), ("--ray", "auto"), "none.*ray start"),
        (FakeRay(gpus=1), ("--ray", "local", "--actors", "2"), "1 GPUs"),
        (FakeRay(), ("--ray", "local", "--actors", "9"), "4 processors"),
        (FakeRay(0), ("--ray", "local", "--actors", "1"), "has died .* the last one"),
        (None, ("--ray", "local", "data.corpus=gone"), "gone"),
        (
            FakeRay(),
            ("--ray", "local", "data.feature_store=null", "data.regenerate=0"),
            "nothing to write",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    work: Path, monkeypatch: pytest.MonkeyPatch, ray: Any, words: tuple[str, ...], said: str
) -> None:
    result = data(monkeypatch, ray, *words)
    assert result.exit_code == 2, result.output
    assert re.search(said, result.output.splitlines()[-1]), result.output


def test_a_machine_with_another_version_is_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "__version__", "0.0.9")
    result = data(monkeypatch, FakeRay())
    assert result.exit_code == 2
    assert "0.0.9 at actor 1; install the same version" in result.output


def test_a_machine_that_does_not_see_the_folder_is_refused(tmp_path: Path) -> None:
    experiment = load_experiment(None, [])
    (tmp_path / "sign").write_text("another")
    for folder in (tmp_path, tmp_path / "gone"):
        place = worker.Place(str(folder), "cache", str(tmp_path / "sign"), "mine")
        answer = worker.DataWorker(experiment).answer("greet", place)
        assert "cannot be read here" in answer.refused


def test_an_actor_is_given_a_gpu_where_there_are_any(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = FakeRay(gpus=3)
    assert data(monkeypatch, ray, "--ray", "auto", "data.regenerate=0").exit_code == 0
    assert len(ray.actors) == 3
    assert ray.resources["num_gpus"] == 1
    assert ray.given["address"] == "auto"


def test_why_an_actor_could_not_begin_is_said(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "an error raised in its creation task, DataWorker()\n  a stack\nModuleNotFoundError: gone"
    result = data(monkeypatch, FakeRay(0, why=why), "--ray", "local", "--actors", "1")
    assert "actor 1 has died (ModuleNotFoundError: gone), and it was the last one" in result.output
