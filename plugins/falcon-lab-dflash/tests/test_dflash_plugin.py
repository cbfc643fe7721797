from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
from dflash_cases import components, engine, target, write
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from falcon_lab.data.batch import Batch
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.distillation.module import Distillation
from falcon_lab.protocols import BuildContext
from falcon_lab.schema import DistillationConfig, OptimizerConfig

OBJECTIVE = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.1, "slot_decay": 0.78}


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, falcon_lab_dflash; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


class Data(LightningDataModule):
    """One packed batch, again and again."""

    def __init__(self, tokens: torch.Tensor, steps: int) -> None:
        super().__init__()
        place = torch.arange(tokens.shape[1]).expand_as(tokens)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        zero = torch.zeros_like(tokens)
        self.batches = [
            Batch(tokens, mask, zero, place, torch.tensor(index)) for index in range(steps)
        ]

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(self.batches[:1], batch_size=None)  # type: ignore[arg-type]


def test_from_distillation_to_decoding() -> None:
    """A head that has learnt a target's own texts drafts most of them, and changes nothing."""
    model, build = target(vocabulary=16), components().build
    plain = PlainEngine(model)
    tokens = torch.tensor([[first, *write(plain, [first], 23).tokens] for first in range(8)])
    torch.manual_seed(0)
    node = {"name": "dflash", "block": 3, "layers": 1, "anchors": 12}
    head, steps = build("drafter", node, BuildContext(model)), 100
    context = BuildContext.of(model, head)
    module = Distillation(
        model,
        head,
        build("objective", OBJECTIVE, context),
        build("schedule", {"name": "random"}, context),
        DistillationConfig(optimizer=OptimizerConfig(lr=5e-3, warmup_steps=5)),
        seed=0,
        max_steps=steps,
    )
    options: dict[str, Any] = {"accelerator": "cpu", "max_steps": steps, "logger": False}
    options |= {"enable_progress_bar": False, "enable_checkpointing": False}
    options |= {"enable_model_summary": False}
    trainer, data = Trainer(**options), Data(tokens, steps)
    trainer.fit(module, data)
    (after,) = trainer.validate(module, data, verbose=False)
    for place in (1, 2, 3):
        assert after[f"val/position_{place}/accuracy"] > 0.7
    head.eval()
    for tree in ({"name": "chain", "depth": 3}, {"name": "optimal", "nodes": 8}):
        by = engine(model, head, tree)
        found = [write(by, row[:2].tolist(), 20) for row in tokens]
        expected = [write(plain, row[:2].tolist(), 20).tokens for row in tokens]
        assert [one.tokens for one in found] == expected
        rounds = [round_ for one in found for round_ in one.rounds]
        assert sum(r.accepted for r in rounds) / len(rounds) > 1.5, tree
