from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.schema import Gate, PretrainingConfig, TargetConfig
from falcon_lab.pretraining.target import (
    built_in_recipe,
    ensure_pretrained,
    recipe_fingerprint,
    recipe_of,
    stored_quality,
    target_folder,
)

RECIPE = PretrainingConfig(steps=3)


def silent(_: str) -> None:
    return None


class Maker:
    """Leaves a judgement and a checkpoint; notes what it found in the folder before."""

    def __init__(self) -> None:
        self.found: list[list[str]] = []

    def __call__(self, name: str, recipe: Any, folder: Path, announce: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.found.append(sorted(path.name for path in folder.iterdir()))
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / "model.safetensors").touch()
        (folder / "quality.json").write_text('{"passed": true}')


def test_the_built_in_target_has_a_recipe_and_others_have_their_own_or_none() -> None:
    assert recipe_of(TargetConfig()) == built_in_recipe("tiny-code")
    assert recipe_of(TargetConfig(name="org/model")) is None
    assert recipe_of(TargetConfig(name="tiny-code", pretraining=RECIPE)) is RECIPE


def test_a_fingerprint_changes_with_what_changes_the_weights_alone(tmp_path: Path) -> None:
    base = recipe_fingerprint(RECIPE)
    assert recipe_fingerprint(replace(RECIPE, gate=Gate(parse=0), checkpoint_every=7)) == base
    assert recipe_fingerprint(replace(RECIPE, seed=1)) != base
    assert recipe_fingerprint(replace(RECIPE, steps=4)) != base
    text = tmp_path / "a.txt"
    text.write_text("one")
    own = replace(RECIPE, corpus=str(tmp_path))
    before = recipe_fingerprint(own)
    text.write_text("two")
    assert recipe_fingerprint(own) != before


def test_a_label_of_any_characters_names_one_folder_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    folder = target_folder("my/odd name", RECIPE)
    assert folder.parent == tmp_path / "targets"
    assert folder.name == f"my-odd-name-{recipe_fingerprint(RECIPE)}"


def test_a_target_is_trained_once_and_its_checkpoints_go(tmp_path: Path) -> None:
    make = Maker()
    lines: list[str] = []
    for _ in range(2):
        ensure_pretrained("small", RECIPE, tmp_path / "target", lines.append, make)
    assert make.found == [[]]
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == [
        "model.safetensors",
        "quality.json",
    ]
    assert lines == [f"target small: training it once (3 steps), kept in {tmp_path / 'target'}"]


def test_an_interrupted_training_goes_on_in_its_folder(tmp_path: Path) -> None:
    make = Maker()
    (tmp_path / "target.partial").mkdir()
    (tmp_path / "target.partial" / "half").touch()
    ensure_pretrained("small", RECIPE, tmp_path / "target", silent, make)
    assert make.found == [["half"]]
    assert (tmp_path / "target" / "half").exists()
    assert not (tmp_path / "target.partial").exists()


def test_a_target_whose_judgement_is_damaged_is_made_again_from_what_is_whole(
    tmp_path: Path,
) -> None:
    make = Maker()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "quality.json").write_text('{"pas')
    (tmp_path / "target" / "loss.json").touch()
    ensure_pretrained("small", RECIPE, tmp_path / "target", silent, make)
    assert make.found == [["loss.json", "quality.json"]]


def test_quality_is_that_of_a_target_trained_here_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    own = TargetConfig(name="small", pretraining=RECIPE)
    folder = target_folder("small", RECIPE)
    folder.mkdir(parents=True)
    (folder / "quality.json").write_text(json.dumps({"passed": True}))
    assert stored_quality(own) == {"passed": True}
    assert stored_quality(TargetConfig(name="org/model")) is None
