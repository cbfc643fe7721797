"""The pre-training of a target, and the steps of making one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.config.schema import Gate, ModelShape, PretrainingConfig
from falcon_lab.data.packing import Batch
from falcon_lab.errors import FalconLabError
from falcon_lab.pretraining.training import (
    Pretraining,
    build_model,
    judged_quality,
    matrices_and_rest,
    next_token_loss,
    trained_model,
    trained_tokenizer,
)
from tiny_models import tiny_tokenizer

SHAPE = ModelShape(layers=1, hidden=16, intermediate=32, heads=2, max_positions=256)


def packed(*documents: list[int], mask: list[int] | None = None) -> Batch:
    """Documents one behind the other in one row."""
    flat = [token for document in documents for token in document]
    numbers = [n for n, document in enumerate(documents) for _ in document]
    places = [place for document in documents for place in range(len(document))]
    return Batch(
        tokens=torch.tensor([flat]),
        loss_mask=torch.tensor([mask or [1] * len(flat)], dtype=torch.bool),
        documents=torch.tensor([numbers]),
        positions=torch.tensor([places]),
        index=torch.tensor(0),
    )


def module(**recipe: float) -> Pretraining:
    model = build_model(SHAPE, tiny_tokenizer(), seed=0)
    return Pretraining(model, PretrainingConfig(model=SHAPE, **recipe))  # type: ignore[arg-type]


def test_the_loss_is_over_tokens_that_follow_one_of_their_own_document() -> None:
    batch = packed([1, 2, 3], [4, 5], mask=[1, 1, 0, 1, 1])
    logits = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    total, count = next_token_loss(logits, batch)
    logs = logits.log_softmax(-1)[0]
    assert count == 2  # 2 after 1 and 5 after 4; 3 is masked, 4 begins a document
    assert float(total) == pytest.approx(float(-logs[0, 2] - logs[3, 5]), rel=1e-5)


def test_a_seed_gives_one_model_and_the_global_state_is_not_touched() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_model(SHAPE, tiny_tokenizer(), seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert weights(first).equal(weights(again))
    assert not weights(first).equal(weights(other))
    assert first.lm_head.weight is first.get_input_embeddings().weight


def weights(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_document_does_not_see_the_one_before_it() -> None:
    trained = module()
    alone, _ = trained.loss_of(packed([4, 5, 6, 7]))
    first, _ = trained.loss_of(packed([9, 8, 9]))
    both, _ = trained.loss_of(packed([9, 8, 9], [4, 5, 6, 7]))
    assert both.item() == pytest.approx((first + alone).item(), rel=1e-4)


def test_only_matrices_decay() -> None:
    model = build_model(SHAPE, tiny_tokenizer(), seed=0)
    matrices, rest = matrices_and_rest(model, 0.1)
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in matrices["params"])
    assert all(p.ndim < 2 for p in rest["params"])
    assert len(matrices["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_the_learning_rate_rises_and_falls() -> None:
    schedule = module(lr=1.0, steps=100, warmup_steps=10).configure_optimizers()["lr_scheduler"]
    factor = schedule["scheduler"].lr_lambdas[0]
    assert factor(0) == pytest.approx(0.1)
    assert factor(9) == pytest.approx(1.0)
    rates = [factor(step) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.01)


def test_a_loss_that_is_no_number_names_the_step_and_what_to_change() -> None:
    trained = module(lr=0.5)
    with torch.no_grad():
        trained.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(FalconLabError, match=r"nan at step 0; lower target\.pretraining\.lr .*0.5"):
        trained.training_step(packed([1, 2, 3]), 0)


# --- the steps ------------------------------------------------------------------------------------


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


def times_of(folder: Path) -> dict[str, int]:
    """When each file of a folder was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file()}


def test_each_step_leaves_its_product_and_is_not_done_again(tmp_path: Path) -> None:
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
    before = times_of(tmp_path)
    again = trained_model(RECIPE, trained_tokenizer(RECIPE, tmp_path), tmp_path)
    assert times_of(tmp_path) == before
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


@pytest.mark.parametrize("content", [b"", b"[" * 20_000, b"\xff\xfe", b"null"])
def test_what_an_earlier_attempt_left_damaged_is_named_with_its_folder(
    tmp_path: Path, content: bytes
) -> None:
    trained_tokenizer(RECIPE, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FalconLabError, match=rf"{tmp_path}: .*damaged .*remove it"):
        trained_tokenizer(RECIPE, tmp_path)
