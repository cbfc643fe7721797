from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from medusa_cases import components, engine, target, write
from torch.utils.data import DataLoader

from falcon_lab.data.batch import Batch
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.distillation.module import Distillation
from falcon_lab.protocols import BuildContext
from falcon_lab.schema import DistillationConfig, OptimizerConfig

FOLDER = Path(__file__).parents[1]


def test_the_readme_names_every_option() -> None:
    text = (FOLDER / "README.md").read_text()
    own = [c for c in components().components if c.distribution == "falcon-lab-medusa"]
    for component in own:
        for field in fields(component.config) if component.config else ():
            assert f"| `{field.name}` | {field.default} |" in text
        assert f"`{component.name}`" in text


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, falcon_lab_medusa; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def texts(model: Any, count: int) -> torch.Tensor:
    """What the target itself writes."""
    plain = PlainEngine(model)
    rows = [[first, *write(plain, [first], 23).tokens] for first in range(count)]
    return torch.tensor(rows)


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


@pytest.mark.parametrize(("head", "label"), [("own", "data"), ("shared", "soft")])
def test_from_distillation_to_decoding(head: str, label: str) -> None:
    """Heads that have learnt a target's own texts draft most of them, and change nothing."""
    model, build = target(vocabulary=16), components().build
    torch.manual_seed(0)
    node = {"name": "medusa", "block": 3, "head": head, "layers": 2}
    heads = build("drafter", node, BuildContext(model))
    context = BuildContext.of(model, heads)
    tokens, steps = texts(model, 8), 120
    module = Distillation(
        model,
        heads,
        build("objective", {"name": "medusa", "label": label}, context),
        build("schedule", {"name": "none"}, context),
        DistillationConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=5), noise=0.0),
        seed=0,
        max_steps=steps,
    )
    options: dict[str, Any] = {"accelerator": "cpu", "max_steps": steps, "logger": False}
    options |= {"enable_progress_bar": False, "enable_checkpointing": False}
    options |= {"enable_model_summary": False}
    trainer, data = Trainer(**options), Data(tokens, steps)
    (before,) = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    (after,) = trainer.validate(module, data, verbose=False)
    assert after["val/loss"] < before["val/loss"]
    for place in (1, 2, 3):
        key = f"val/position_{place}/accuracy"
        assert after[key] > max(0.6, before[key])
    heads.eval()
    engines = {
        tree["name"]: engine(model, heads, tree, {"name": "auto"})
        for tree in ({"name": "chain", "depth": 3}, {"name": "static", "template": "mc_sim_7b_63"})
    }
    for name, by in engines.items():
        found = [write(by, row[:2].tolist(), 20) for row in tokens]
        expected = [write(PlainEngine(model), row[:2].tolist(), 20).tokens for row in tokens]
        assert [one.tokens for one in found] == expected
        rounds = [round_ for one in found for round_ in one.rounds]
        assert sum(r.accepted for r in rounds) / len(rounds) > 1.0, name
