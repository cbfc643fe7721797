from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falcon_lab.config.load import experiment_of
from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.interfaces import TargetTuner, TuningBatch
from falcon_lab.model.loading import load_target
from falcon_lab.plugins.discovery import builtins, registered_by
from falcon_lab.plugins.hooks import Component, TuningOptions
from falcon_lab.plugins.registry import Components
from falcon_lab.pretraining.target import ensure_target, stored_quality, target_ahead
from falcon_lab.pretraining.tuned import read_tuning, tuning_sentence
from tiny_models import save_tiny


@dataclass
class Options(TuningOptions):
    """Small ones, and one of its own."""

    length: int = 32
    batch_size: int = 2
    documents: int = 20
    validation: int = 2
    max_steps: int = 4
    lr: float = 1e-2
    checkpoint_every: int = 1
    warmup_steps: int = 0
    stop_at: int = -1


@dataclass
class Strange:
    """None of a tuner's."""

    width: int = 3


class NextTokens(TargetTuner):
    """Trains the final norm on next tokens, with noise; may stop in the middle once."""

    begun = 0

    def __init__(self, config: Options, context: Any) -> None:
        self.config = config

    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        type(self).begun += 1
        self.model, self.steps = model, 0
        model.model.norm.requires_grad_(True)
        module: nn.Module = model
        return module

    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        self.steps += 1
        if self.steps == self.config.stop_at:
            raise KeyboardInterrupt
        logits = self.model(input_ids=batch.tokens).logits[:, :-1]
        noise = torch.rand((), generator=batch.generator)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.tokens[:, 1:].flatten(), reduction="sum"
        )
        return {"next": (loss * (1 + 0.1 * noise), batch.tokens[:, 1:].numel())}

    def finish(self) -> Any:
        return self.model.requires_grad_(False)


@pytest.fixture
def known() -> Components:
    """A registry with two tuners, of which one has no options of a tuner."""
    NextTokens.begun = 0
    mine = ("theirs", "1")
    return Components(
        [
            *registered_by(builtins, "falcon-lab", "0"),
            Component("tuner", "next", NextTokens, Options, *mine),
            Component("tuner", "strange", NextTokens, Strange, *mine),
        ]
    )


def config_of(folder: Path, known: Components, **options: Any) -> TargetConfig:
    node = known.check("tuner", {"name": "next", "corpus": "generated", **options}, "target.tune")
    return TargetConfig(name=str(folder), device="cpu", tune=node)


def test_a_target_is_tuned_once_and_names_its_parent(tmp_path: Path, known: Components) -> None:
    parent = load_target(TargetConfig(name=str(save_tiny(tmp_path / "parent")), device="cpu"))
    config = config_of(tmp_path / "parent", known)
    said: list[str] = []
    ahead = target_ahead(config, said.append, known)
    assert ahead.stands_in
    assert not any("tuning it once" in line for line in said)
    tuned = ahead.itself(config, said.append, known)
    assert tuned.fingerprint != parent.fingerprint
    assert tuned.name.endswith("parent+next")
    assert tuned.tuning["parent"]["fingerprint"] == parent.fingerprint
    assert tuned.tuning["perplexity"] < tuned.tuning["parent_perplexity"]
    assert tuned.tuning["provenance"]["distribution"] == "theirs"
    [line] = [line for line in said if "kept in" in line]
    folder = Path(line.partition("kept in ")[2])
    assert parent.fingerprint in (folder / "README.md").read_text(encoding="utf-8")
    assert load_target(TargetConfig(name=str(folder))).fingerprint == tuned.fingerprint
    before = NextTokens.begun
    again = ensure_target(replace(config, dtype="bfloat16"), said.append, known)
    assert (again.fingerprint, NextTokens.begun) == (tuned.fingerprint, before)
    assert not target_ahead(config, said.append, known).stands_in
    assert stored_quality(config, known) is None


def test_other_options_make_another_target(tmp_path: Path, known: Components) -> None:
    save_tiny(tmp_path / "parent")
    made = [
        ensure_target(config_of(tmp_path / "parent", known, max_steps=steps), print, known)
        for steps in (1, 2)
    ]
    assert made[0].fingerprint != made[1].fingerprint


def test_a_tuning_that_was_stopped_goes_on_to_the_same_weights(
    tmp_path: Path, known: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "parent")
    whole = ensure_target(config_of(tmp_path / "parent", known), print, known)
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "other"))
    config = config_of(tmp_path / "parent", known)
    found = known.find("tuner", "next")

    def stopping(options: Options, context: Any) -> NextTokens:
        return NextTokens(replace(options, stop_at=3), context)

    stops = Components([*known.components[:-2], replace(found, build=stopping)])
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        ensure_target(config, print, stops)
    assert not list((tmp_path / "other").rglob("tuning.json"))
    assert list((tmp_path / "other").rglob("last.ckpt"))
    assert ensure_target(config, print, known).fingerprint == whole.fingerprint


def asking(tmp_path: Path, labels: str) -> dict[str, Any]:
    """Options by which questions of two endings are asked."""
    file = tmp_path / f"{labels}.jsonl"
    lines = [
        {"ctx": f"so {i}", "endings": ["a b", "b"], "label": int(x)} for i, x in enumerate(labels)
    ]
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return {"choices": str(file)}


def test_questions_complete_the_card_of_a_target_that_was_tuned_without_them(
    tmp_path: Path, known: Components
) -> None:
    save_tiny(tmp_path / "parent")
    config = config_of(tmp_path / "parent", known)
    without = ensure_target(config, print, known)
    assert without.tuning["choices"] is None
    assert "multiple-choice" not in tuning_sentence(without.tuning)
    begun = NextTokens.begun
    asks = config_of(tmp_path / "parent", known, **asking(tmp_path, "0110"))
    ahead = target_ahead(asks, print, known)
    assert ahead.target.tuning["choices"] is None  # nothing is measured before the first stage
    tuned = ahead.itself(asks, print, known)
    assert (tuned.fingerprint, NextTokens.begun) == (without.fingerprint, begun)
    found = tuned.tuning["choices"]
    assert found["questions"] == 4
    for name in ("acc", "acc_norm"):
        figures = found[name]
        assert figures["low"] <= figures["difference"] <= figures["high"]
        assert f"{figures['parent']:.1%}" in tuning_sentence(tuned.tuning)
    assert not target_ahead(asks, print, known).stands_in
    said: list[str] = []
    assert ensure_target(config, said.append, known).tuning == tuned.tuning
    assert not any("multiple-choice" in line for line in said)
    others = config_of(tmp_path / "parent", known, **asking(tmp_path, "01"))
    assert ensure_target(others, print, known).tuning["choices"]["questions"] == 2


def test_a_card_of_a_version_without_questions_is_read(tmp_path: Path, known: Components) -> None:
    save_tiny(tmp_path / "parent")
    tuned = ensure_target(config_of(tmp_path / "parent", known), print, known)
    old = {key: value for key, value in tuned.tuning.items() if key != "choices"}
    (tmp_path / "tuning.json").write_text(json.dumps(old), encoding="utf-8")
    card = read_tuning(tmp_path)
    assert card is not None
    assert card.choices is None


def test_questions_are_checked_before_anything_is_tuned(tmp_path: Path, known: Components) -> None:
    save_tiny(tmp_path / "parent")
    config = config_of(tmp_path / "parent", known, choices=str(tmp_path / "none.jsonl"))
    with pytest.raises(FalconLabError, match=r"none\.jsonl"):
        target_ahead(config, print, known)
    assert NextTokens.begun == 0


def test_a_damaged_card_is_none(tmp_path: Path) -> None:
    assert read_tuning(tmp_path) is None
    (tmp_path / "tuning.json").write_text(json.dumps({"parent": 3}))
    assert read_tuning(tmp_path) is None


def test_a_tuner_reads_the_experiment_s_corpus_unless_it_has_its_own(known: Components) -> None:
    def corpus(**options: Any) -> Any:
        tree = {"target": {"tune": {"name": "next", **options}}, "data": {"corpus": "stdlib"}}
        return (experiment_of(tree, known).target.tune or {})["corpus"]

    assert corpus() == "stdlib"
    assert corpus(corpus="generated") == "generated"


@pytest.mark.parametrize(
    ("node", "what"),
    [
        ({"name": "nxt"}, "no tuner named 'nxt'.*next"),
        ({}, "target.tune.name"),
        ({"name": "next", "weight_decay": -1}, "target.tune.weight_decay"),
        ({"name": "strange"}, "TuningOptions"),
    ],
    ids=["unknown", "nameless", "value", "strange"],
)
def test_a_wrong_node_is_refused(node: dict[str, Any], what: str, known: Components) -> None:
    with pytest.raises(ConfigError, match=what):
        experiment_of({"target": {"tune": node}}, known)


def test_what_has_no_room_is_refused(
    tmp_path: Path, known: Components, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "parent")
    monkeypatch.setattr("falcon_lab.pretraining.tuning.free_memory", lambda device: 10)
    with pytest.raises(FalconLabError, match=r"target\.tune: .* are free"):
        target_ahead(config_of(tmp_path / "parent", known), print, known)
