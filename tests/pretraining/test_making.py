from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from falcon_lab.config.schema import Gate, ModelShape, PretrainingConfig
from falcon_lab.pretraining import training as making
from falcon_lab.pretraining.training import judged_quality, trained_model, trained_tokenizer

RECIPE = PretrainingConfig(
    documents=40,
    vocabulary=300,
    model=ModelShape(layers=1, hidden=32, intermediate=64, heads=2, max_positions=256),
    length=64,
    batch_size=2,
    steps=2,
    warmup_steps=1,
    gate=Gate(prompts=2, max_new_tokens=8),
)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this step was done before")


def test_each_step_leaves_its_product_and_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = trained_tokenizer(RECIPE, tmp_path)
    assert len(tokenizer) <= RECIPE.vocabulary
    assert tokenizer.model_max_length == RECIPE.model.max_positions
    assert not list(tmp_path.glob("tokenizer-*"))
    model = trained_model(RECIPE, tokenizer, tmp_path)
    assert not model.training
    loss = json.loads((tmp_path / "loss.json").read_text())["nats_per_token"]
    assert 1 < loss < 7
    quality = judged_quality("small", RECIPE, model, tokenizer, tmp_path)
    assert quality.loss == loss
    assert quality.completions == 2
    assert json.loads((tmp_path / "quality.json").read_text()) == quality.as_dict()
    for name in ("train_tokenizer", "train"):
        monkeypatch.setattr(making, name, never)
    again = trained_model(RECIPE, trained_tokenizer(RECIPE, tmp_path), tmp_path)
    assert all(
        kept.equal(made) for kept, made in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_a_tokenizer_that_was_half_written_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def killed(self: Path, target: Any) -> Path:
        if self.name == "tokenizer_config.json":
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            trained_tokenizer(RECIPE, tmp_path)
    assert (tmp_path / "tokenizer.json").exists()
    assert len(trained_tokenizer(RECIPE, tmp_path)) > 256


def test_figures_that_were_half_written_are_measured_again(tmp_path: Path) -> None:
    tokenizer = trained_tokenizer(RECIPE, tmp_path)
    trained_model(RECIPE, tokenizer, tmp_path)
    whole = (tmp_path / "loss.json").read_text()
    (tmp_path / "loss.json").write_text(whole[:10])
    trained_model(RECIPE, tokenizer, tmp_path)
    assert (tmp_path / "loss.json").read_text() == whole
