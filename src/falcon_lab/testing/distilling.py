"""A few steps of distillation on a tiny target, with the module that trains every drafter.

Shapes: B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.config.schema import DistillationConfig, OptimizerConfig
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.decoding import plain_text
from falcon_lab.testing.targets import packed

if TYPE_CHECKING:
    from falcon_lab.distill.module import Distillation

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
"""Arguments of a ``lightning.Trainer`` that writes nothing anywhere."""


def own_texts(target: Target, count: int = 8, length: int = 24) -> Tensor:
    """Return ``[count, length]`` long: greedy texts of the target, each from another token."""
    return torch.tensor(
        [[first, *plain_text(target, [first], length - 1)] for first in range(count)]
    )


def distillation(
    target: Target,
    drafter: Any,
    *,
    objective: Any = None,
    schedule: Any = None,
    components: Components | None = None,
    steps: int = 1,
    seed: int = 0,
    lr: float = 1e-2,
    hyperparameters: Mapping[str, Any] | None = None,
    **config: Any,
) -> Distillation:
    """Make the module that trains a drafter.

    Args:
        target: the teacher.
        drafter: the object.
        objective: a YAML node, which is built, or the object; None is ``falcon``.
        schedule: likewise, of glances; None is ``none``.
        components: build the nodes; None are the installed ones.
        steps: of the whole training.
        seed: of everything random.
        lr: the largest learning rate.
        hyperparameters: that its checkpoints store.
        config: more of ``schema.DistillationConfig``.
    """
    from falcon_lab.distill.module import Distillation

    known, context = components or load_components(), BuildContext.of(target, drafter)
    return Distillation(
        target,
        drafter,
        known.provide("objective", objective or {"name": "falcon"}, context),
        known.provide("schedule", schedule or {"name": "none"}, context),
        DistillationConfig(optimizer=OptimizerConfig(lr=lr, warmup_steps=2), **config),
        seed=seed,
        max_steps=steps,
        hyperparameters=hyperparameters,
    )


def distil(module: Distillation, texts: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Train to the end on ``[B, T]`` tokens, in every step the same ones.

    Returns:
        Metrics of validation on the same texts, before and after. The drafter is in evaluation
        mode then.
    """
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    batch = packed([[text] for text in texts])
    batches: Any = [batch._replace(index=torch.tensor(step)) for step in range(module.max_steps)]
    trainer = Trainer(**QUIET, max_steps=module.max_steps)
    once = DataLoader(batches[:1], batch_size=None)
    (before,) = trainer.validate(module, once, verbose=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    (after,) = trainer.validate(module, once, verbose=False)
    module.drafter.eval()
    return dict(before), dict(after)
