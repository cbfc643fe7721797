"""Hidden states from files in place of passes through the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fakes.states import StatesServer
from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.state_files import LAYERS, WANTED, asked_for
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.model.target import Target
from tiny_models import tiny_target


def module(target: Target, folder: Path, states: Path | None = None) -> FalconDataModule:
    """The data of a target, with a store that is filled by it or from files."""
    config = DataConfig(
        documents=4,
        length=48,
        validation=1,
        batch_size=2,
        feature_store=str(folder),
        extracted_states=None if states is None else str(states),
    )
    return FalconDataModule.for_target(config, target)


def asked(target: Target, tmp_path: Path, taps: Sequence[int] = ()) -> FalconDataModule:
    """The data of a target whose states have been asked for."""
    data = module(target, tmp_path / "store", tmp_path / "states")
    with pytest.raises(FalconLabError, match=r"texts have no states in .*serving extract"):
        data.build_features(target, taps=taps)
    return data


@torch.no_grad()
def test_a_store_filled_from_files_is_the_one_that_the_target_fills(tmp_path: Path) -> None:
    target = tiny_target(vocab=300)
    there = asked(target, tmp_path, [0, 1])
    wanted, texts = asked_for(tmp_path / "states")
    assert wanted.layers == [0, 1, 2]
    StatesServer(target).write(tmp_path / "states", at_most=len(texts) - 1)
    with pytest.raises(FalconLabError, match=rf"1 of {len(texts)} texts have no states"):
        there.build_features(target, taps=[0, 1])
    StatesServer(target).write(tmp_path / "states")
    there.build_features(target, taps=[0, 1])
    here = module(target, tmp_path / "here")
    here.build_features(target, taps=[0, 1])
    for number in range(len(here.train_sequences) // 2):
        ours, theirs = here.batches()[number], there.batches()[number]
        counted = ours.documents >= 0
        for name in ("features", "taps"):
            both = [getattr(each, name)[counted] for each in (theirs, ours)]
            torch.testing.assert_close(*both)
        assert torch.equal(ours.argmax, theirs.argmax)  # type: ignore[arg-type]


def test_a_finished_store_asks_for_nothing(tmp_path: Path) -> None:
    target = tiny_target(vocab=300)
    module(target, tmp_path / "store").build_features(target)
    module(target, tmp_path / "store", tmp_path / "states").build_features(target)
    assert not (tmp_path / "states").exists()


Damage = Callable[[Path], object]


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def changed(layers: list[int] | None = None, **parts: Any) -> Damage:
    """What replaces tensors of a file, or says that it has other layers."""

    def change(path: Path) -> None:
        found = load_file(path)
        made = {name: part(found[name]).clone() for name, part in parts.items()}
        save_file(found | made, path, {LAYERS: json.dumps(layers or [1, 2])})

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, "is damaged .*write it again"),
        (lambda path: path.write_bytes(b""), "is damaged .*write it again"),
        (lambda path: save_file({"weight": torch.zeros(2)}, path), r"no hidden states \(weight\)"),
        (
            changed([1], hidden_states=lambda states: states[:, :1]),
            r"layers \[1\], and those of \[2\] .*another folder",
        ),
        (lambda path: save_file(load_file(path), path), "does not say which layers"),
        (changed(token_ids=lambda tokens: tokens + 1), "another text"),
        (changed(hidden_states=lambda states: states[:, :, :5]), "ran another model"),
        (changed(hidden_states=lambda states: states * torch.inf), "not finite"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, damage: Damage, said: str) -> None:
    target = tiny_target(vocab=300)
    data = asked(target, tmp_path, [1])
    StatesServer(target).write(tmp_path / "states")
    for path in (tmp_path / "states").glob("*.safetensors"):
        damage(path)
    with pytest.raises(FalconLabError, match=rf"\w{{32}}\.safetensors: .*{said}") as raised:
        data.build_features(target, taps=[1])
    assert len(str(raised.value).splitlines()) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("server", "said"),
    [
        (lambda: StatesServer(tiny_target(vocab=300, seed=1)), "layer 1 are .* another model"),
        (
            lambda: StatesServer(tiny_target(vocab=300), given=[0, 2]),
            "nearer to those of layer 0; .*counts layers otherwise",
        ),
        (
            lambda: StatesServer(tiny_target(vocab=300), given=[1, 1]),
            "layer 2 are .* from the target's own",
        ),
    ],
    ids=["another model", "a layer off by one", "the last layer off by one"],
)
def test_states_that_are_not_the_targets_are_refused(
    tmp_path: Path, server: Callable[[], StatesServer], said: str
) -> None:
    target = tiny_target(vocab=300)
    data = asked(target, tmp_path, [1])
    server().write(tmp_path / "states")
    with pytest.raises(FalconLabError, match=said):
        data.build_features(target, taps=[1])


def test_a_file_that_is_being_written_is_none(tmp_path: Path) -> None:
    target = tiny_target(vocab=300)
    data = asked(target, tmp_path)
    StatesServer(target).write(tmp_path / "states", at_most=1)
    [path] = (tmp_path / "states").glob("*.safetensors")
    path.rename(path.with_name(f".123.{path.name}"))
    before = asked_for(tmp_path / "states")
    with pytest.raises(FalconLabError, match="texts have no states"):
        data.build_features(target)
    assert asked_for(tmp_path / "states") == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not say whose states"),
        ("{}\n", "does not say whose states"),
        ('{"target": "a", "layers": [1]}\n{"tokens": ["b"]}\n', "line 2 holds no tokens"),
    ],
)
def test_what_is_wanted_must_be_readable(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / WANTED).write_text(content)
    with pytest.raises(FalconLabError, match=said):
        asked_for(tmp_path)


def test_states_without_a_store_are_refused_with_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"data\.extracted_states: .*data\.feature_store"):
        load_experiment(None, ["data.extracted_states=states"])
