"""A training reads the same from a feature store as from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distilling import distillation
from fakes.drafters import TrainedAlone
from fakes.states import StatesServer
from falcon_lab.config.schema import DataConfig
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.data.generated.corpus import generate_modules
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Prediction
from tiny_models import tiny_target


class Student(nn.Module, TrainedAlone):
    """Mixes features with the states of two layers, out of their order."""

    taps = (1, 0)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Linear(3 * 32, 32)

    def forward(self, inputs: DrafterInputs, reveal: object = None) -> Prediction:
        assert inputs.taps is not None
        column = torch.arange(inputs.tokens.shape[1]).expand_as(inputs.tokens)
        read = torch.cat([inputs.features[:, :, None], inputs.taps], dim=2).flatten(2)
        features = self.mix(read.to(self.mix.weight))
        return Prediction(features, None, column + 1, column, torch.zeros_like(column), column)


def losses_and_gradients(target: Any, batches: list[Any]) -> list[tuple[Tensor, Tensor]]:
    module = distillation(drafter=Student(), target=target)
    found = []
    for batch in batches:
        loss, _ = module.step(batch).train(0.3)
        [gradient] = torch.autograd.grad(loss, [module.drafter.mix.weight])
        found.append((loss.detach(), gradient))
    return found


@pytest.mark.parametrize(
    ("dtype", "kept", "near"),
    [
        (torch.float32, "auto", 0.0),
        (torch.bfloat16, "auto", 0.0),
        (torch.float32, "float16", 1e-3),
        (torch.float32, "float8_e4m3", 5e-2),
    ],
)
def test_a_training_from_a_store_is_one_on_line(
    tmp_path: Path, dtype: torch.dtype, kept: str, near: float
) -> None:
    target = tiny_target("llama", vocab=300)
    target.model.to(dtype)
    config = DataConfig(
        documents=8,
        length=32,
        batch_size=2,
        validation=0,
        feature_store=str(tmp_path),
        feature_store_dtype=kept,
        feature_store_taps=[1],
    )
    data = FalconDataModule(config, train_tokenizer(generate_modules("train", 20), 300))
    said: list[str] = []
    data.build_features(target, said.append, Student.taps)
    assert "and the states of layers 0, 1 in" in said[0]
    assert len(said) == (1 if kept == "auto" else 2)
    stored = [data.batches()[number] for number in range(3)]
    on_line = [batch._replace(features=None, argmax=None, taps=None) for batch in stored]
    pairs = (losses_and_gradients(target, batches) for batches in (stored, on_line))
    for found, expected in zip(*pairs, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).norm() <= near * theirs.norm()


def test_a_training_from_states_of_a_server_is_one_on_line(tmp_path: Path) -> None:
    target = tiny_target("llama", vocab=300)
    config = DataConfig(
        documents=8,
        length=32,
        batch_size=2,
        validation=0,
        feature_store=str(tmp_path / "store"),
        extracted_states=str(tmp_path / "states"),
    )
    data = FalconDataModule(config, train_tokenizer(generate_modules("train", 20), 300))
    with pytest.raises(FalconLabError, match="texts have no states"):
        data.build_features(target, taps=Student.taps)
    StatesServer(target).write(tmp_path / "states")
    data.build_features(target, taps=Student.taps)
    stored = [data.batches()[number] for number in range(3)]
    on_line = [batch._replace(features=None, argmax=None, taps=None) for batch in stored]
    pairs = (losses_and_gradients(target, batches) for batches in (stored, on_line))
    for found, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
