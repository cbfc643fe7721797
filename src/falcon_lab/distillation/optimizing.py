"""The optimiser and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from falcon_lab.schema import OptimizerConfig


def make_optimizer(
    weights: Sequence[nn.Parameter], config: OptimizerConfig, max_steps: int
) -> dict[str, Any]:
    """AdamW and its schedule, as Lightning's ``configure_optimizers`` returns them."""
    optimizer = torch.optim.AdamW(
        weights,
        lr=config.lr,
        betas=cast(tuple[float, float], tuple(config.betas)),
        weight_decay=config.weight_decay,
    )
    schedule = LambdaLR(optimizer, lambda step: lr_factor(step, max_steps, config))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def lr_factor(step: int, max_steps: int, config: OptimizerConfig) -> float:
    """Share of the learning rate at ``step``: linear warm-up, then cosine to ``final_lr``."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    decay = max(1, max_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay)
    return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
