from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.schema import Gate, PretrainingConfig, TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import TargetContext
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.quality import Quality
from falcon_lab.pretraining.target import (
    ensure_pretrained,
    ensure_target,
    hub_id_of_target,
    recipe_fingerprint,
    source_of,
    stored_quality,
    target_folder,
)
from tiny_models import save_tiny

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
        figures = Quality(1.0, 1.0, 1.0, 1, True, "well")
        (folder / "quality.json").write_text(json.dumps(figures.as_dict()))


def registry(*builders: Any) -> Components:
    return Components(
        Component("target", f"mine{number}", build, None, "theirs", "1")
        for number, build in enumerate(builders)
    )


def test_a_registered_name_leads_to_its_source_and_any_other_to_itself(tmp_path: Path) -> None:
    known = registry(
        lambda config, context: RECIPE,
        lambda config, context: tmp_path / "model.gguf",
        lambda config, context: "org/model",
    )
    sources = [source_of(TargetConfig(name=f"mine{n}"), components=known) for n in range(3)]
    assert sources == [RECIPE, str(tmp_path / "model.gguf"), "org/model"]
    assert source_of(TargetConfig(name="theirs/mine2"), components=known) == "org/model"
    assert source_of(TargetConfig(name="org/other"), components=known) == "org/other"


def test_a_hub_id_is_what_the_world_knows_and_never_a_path(tmp_path: Path) -> None:
    def file(config: None, context: TargetContext) -> Path:
        return tmp_path

    said = Component("target", "mine", file, None, "theirs", "1", published="org/model")
    quiet = Component("target", "other", file, None, "theirs", "1")
    known = Components([said, quiet])
    names = ("mine", "other", "a/model", "plain", str(tmp_path))
    found = [hub_id_of_target(TargetConfig(name=name), known) for name in names]
    assert found == ["org/model", None, "a/model", None, None]


def test_the_default_target_is_registered_and_a_recipe_goes_before_any_name() -> None:
    shipped = source_of(TargetConfig())
    assert isinstance(shipped, PretrainingConfig)
    assert (shipped.corpus, shipped.model.layers) == ("generated", 16)
    assert source_of(TargetConfig(pretraining=RECIPE)) is RECIPE


def test_a_builder_may_announce_and_what_is_no_source_is_refused(tmp_path: Path) -> None:
    said: list[str] = []

    def download(config: None, context: TargetContext) -> str:
        context.announce("one moment")
        return "org/model"

    odd = replace(RECIPE, steps=-1)
    away = tmp_path / "away.gguf"
    known = registry(download, lambda *_: 3, lambda *_: odd, lambda *_: away)
    assert source_of(TargetConfig(name="mine0"), said.append, known) == "org/model"
    assert said == ["one moment"]
    with pytest.raises(FalconLabError, match=r"mine1 is a int; .*theirs 1"):
        source_of(TargetConfig(name="mine1"), components=known)
    with pytest.raises(FalconLabError, match=r"mine2: .*steps.*-1.*theirs 1"):
        source_of(TargetConfig(name="mine2"), components=known)
    with pytest.raises(FalconLabError, match=r"mine3: .*away\.gguf"):
        ensure_target(TargetConfig(name="mine3"), components=known)


def test_a_registered_folder_is_loaded_under_the_registered_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    known = registry(lambda config, context: folder)
    config = TargetConfig(name="mine0", device="cpu")
    target = ensure_target(config, silent, known)
    assert target.name == "mine0"
    assert target.fingerprint == ensure_target(replace(config, name=str(folder))).fingerprint
    assert stored_quality(config, known) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tiny-cod", "tiny-code"),
        ("{}/modle", "{}/model"),
        ("{}/wights.gguf", "{}/weights.gguf"),
        ("org/smol-instrukt", "org/smol-instruct"),
    ],
)
def test_a_mistyped_target_is_guessed_from_names_folders_files_and_fetched_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--org--smol-instruct").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(FalconLabError) as caught:
        ensure_target(TargetConfig(name=name.format(tmp_path)))
    assert f"did you mean '{meant.format(tmp_path)}'?" in str(caught.value)


def test_an_unknown_target_that_is_like_none_lists_the_registered_ones() -> None:
    with pytest.raises(FalconLabError, match=r"cannot be loaded: .*; registered: mine0$"):
        ensure_target(TargetConfig(name="zzz"), silent, registry(lambda *_: "org/model"))


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
    figures = Quality(1.0, 1.0, 1.0, 1, True, "well").as_dict()
    (folder / "quality.json").write_text(json.dumps(figures))
    assert stored_quality(own) == figures
    assert stored_quality(TargetConfig(name="org/model")) is None
