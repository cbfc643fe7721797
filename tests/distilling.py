"""A small distillation for tests: target, batches that can be resumed, module, and a logger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from falcon_lab import testing
from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.testing.targets import packed
from tiny_models import tiny_target

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "log_every_n_steps": 1,
    "max_steps": 6,
}


def batch(index: int, *, size: int = 2, length: int = 24) -> Batch:
    """A batch of two packed documents a sequence; the same index gives the same batch."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(2, 64, (size, length), generator=generator)
    cut = length // 3
    return packed([[row[:cut], row[cut:]] for row in tokens])._replace(index=torch.tensor(index))


class Batches:
    """Batches by number, in order; remembers where it is."""

    def __init__(self, indices: list[int], size: int = 2) -> None:
        self.indices, self.size, self.place = indices, size, 0

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        while self.place < len(self.indices):
            index = self.indices[self.place]
            self.place += 1
            yield batch(index, size=self.size)
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Data(LightningDataModule):
    """``Batches`` for training and validation."""

    def __init__(self, train: list[int], validation: list[int] | None = None) -> None:
        super().__init__()
        self.train, self.validation = Batches(train), validation

    def train_dataloader(self) -> Batches:
        return self.train

    def val_dataloader(self) -> Any:
        if self.validation is None:
            return []
        return DataLoader([batch(index) for index in self.validation], batch_size=None)  # type: ignore[arg-type]


def distillation(
    *,
    glancing: Any = None,
    objective: Any = None,
    drafter: Any = None,
    target: Any = None,
    lr: float = 1e-2,
    noise: float = 0.1,
    repeats: int = 1,
    unroll: int = 1,
    compiled: bool = False,
    least_squares: int = 0,
    max_steps: int = 6,
    **options: Any,
) -> Distillation:
    """A module with the defaults of an experiment, on a tiny target."""
    target = target or tiny_target()
    if drafter is None:
        torch.manual_seed(1)
        drafter = FalconDrafter(FalconConfig(**options), BuildContext(target))
    return testing.distillation(
        target,
        drafter,
        objective=objective,
        schedule=glancing or {"name": "csgd"},
        steps=max_steps,
        seed=7,
        lr=lr,
        noise=noise,
        repeats=repeats,
        unroll=unroll,
        compile=compiled,
        least_squares=least_squares,
        checkpoint_every=3,
        hyperparameters={"name": "test", "nested": {"k": 2}},
    )


def weights(module: Distillation) -> dict[str, Tensor]:
    """A copy of the drafter's weights."""
    return {name: tensor.clone() for name, tensor in module.drafter.state_dict().items()}


class Notes(Logger):
    """A logger that stores what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "notes"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def series(self, key: str) -> list[float]:
        return [line[key] for _, line in self.lines if key in line]
