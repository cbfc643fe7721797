"""What the numbers and words of an experiment may be, where a type does not say it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from falcon_lab.config.schema import STAGES, Experiment
from falcon_lab.errors import ConfigError, did_you_mean, join


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``; ``above`` excludes ``low`` itself."""

    low: float
    high: float = float("inf")
    above: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        least = f"more than {self.low:g}" if self.above else f"at least {self.low:g}"
        return least if self.high == float("inf") else f"{least} and at most {self.high:g}"


COUNT, SIZE, WEIGHT, POSITIVE = Range(0), Range(1), Range(0.0), Range(0.0, above=True)
SHARE = Range(0.0, 1.0)

RANGES = {
    "seed": COUNT,
    "target.pretraining.documents": SIZE,
    "target.pretraining.vocabulary": Range(257),  # all bytes and the end of a text
    "target.pretraining.model.layers": SIZE,
    "target.pretraining.model.hidden": SIZE,
    "target.pretraining.model.intermediate": SIZE,
    "target.pretraining.model.heads": SIZE,
    "target.pretraining.model.max_positions": Range(2),
    "target.pretraining.length": Range(2),
    "target.pretraining.batch_size": SIZE,
    "target.pretraining.steps": SIZE,
    "target.pretraining.lr": POSITIVE,
    "target.pretraining.warmup_steps": COUNT,
    "target.pretraining.weight_decay": WEIGHT,
    "target.pretraining.checkpoint_every": SIZE,
    "target.pretraining.gate.parse": SHARE,
    "target.pretraining.gate.distinct": SHARE,
    "target.pretraining.gate.prompts": SIZE,
    "target.pretraining.gate.max_new_tokens": SIZE,
    "data.documents": SIZE,
    "data.regenerate": SHARE,
    "data.length": Range(2),
    "data.batch_size": SIZE,
    "data.validation": COUNT,
    "data.workers": COUNT,
    "distillation.optimizer.lr": POSITIVE,
    "distillation.optimizer.weight_decay": WEIGHT,
    "distillation.optimizer.warmup_steps": COUNT,
    "distillation.optimizer.final_lr": SHARE,
    "distillation.noise": WEIGHT,
    "distillation.repeats": SIZE,
    "distillation.own_features": SHARE,
    "distillation.unroll": SIZE,
    "distillation.unroll_decay": Range(0.0, 1.0, above=True),
    "distillation.logits_mib": SIZE,
    "distillation.checkpoint_every": SIZE,
    "distillation.decode_every": COUNT,
    "distillation.decode_prompts": SIZE,
    "distillation.decode_tokens": SIZE,
    "decoding.prefill_chunk": SIZE,
    "decoding.kv_memory": POSITIVE,
    "evaluation.prompts.limit": SIZE,
    "evaluation.prompts.prompt_tokens": SIZE,
    "evaluation.max_new_tokens": SIZE,
    "evaluation.temperature": WEIGHT,
    "evaluation.top_k": COUNT,
    "evaluation.top_p": Range(0.0, 1.0, above=True),
    "evaluation.repeats": SIZE,
    "evaluation.warmup": COUNT,
    "evaluation.threads": SIZE,
}

WORDS = {
    "target.dtype": ("auto", "float32", "bfloat16", "float16", "float64"),
    "target.attention": ("auto", "sdpa", "eager", "flex_attention", "flash_attn", "torch_flash"),
    "decoding.compile": ("none", "drafter", "all"),
    "wandb.mode": ("offline", "online", "disabled"),
}


def check_limits(experiment: Experiment) -> None:
    """Raise ``ConfigError`` for the first value that cannot work."""
    for key, value in _values(experiment, ""):
        if key in RANGES and value not in RANGES[key]:
            raise ConfigError(key, f"is {value:g}; it must be {RANGES[key]}")
        if key in WORDS and value not in WORDS[key]:
            raise ConfigError(key, f"is {value!r}{did_you_mean(value, WORDS[key])}")
    _check_shapes(experiment)


def _check_shapes(experiment: Experiment) -> None:
    for index, stage in enumerate(experiment.stages):
        if stage not in STAGES:
            raise ConfigError(
                f"stages[{index}]", f"no stage {stage!r}{did_you_mean(stage, STAGES)}"
            )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", experiment.target.device):
        problem = f"is {experiment.target.device!r}; write auto, cpu, cuda or cuda:N"
        raise ConfigError("target.device", problem)
    betas = experiment.distillation.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError("distillation.optimizer.betas", f"is {betas}; give two in [0, 1)")
    recipe = experiment.target.pretraining
    if recipe is not None and recipe.model.hidden % recipe.model.heads:
        problem = f"is {recipe.model.heads}, which does not divide hidden={recipe.model.hidden}"
        raise ConfigError("target.pretraining.model.heads", problem)
    for name in experiment.variants:
        if not re.fullmatch(r"[\w.+=-]+", name):
            raise ConfigError(f"variants.{name}", "names a folder; use letters, digits and _.+=-")
    if not experiment.name.strip():
        raise ConfigError("name", "is empty; the run's folder is called after it")


def _values(section: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Full key and value of everything that is set (null says: leave it to us)."""
    for field in fields(section):
        value, full = getattr(section, field.name), join(key, field.name)
        if is_dataclass(value):
            yield from _values(value, full)
        elif value is not None:
            yield full, value
