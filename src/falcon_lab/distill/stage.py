"""The distillation stage of a run: data in, a saved drafter out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import PromptsConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.distill.module import Distillation
from falcon_lab.distill.randomness import derive_seed
from falcon_lab.distill.training import DecodeProbe, train
from falcon_lab.drafters.saved import save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, TrainableDrafter, is_trainable
from falcon_lab.measure.prompts import load_prompts

if TYPE_CHECKING:
    from falcon_lab.run import Run

STEPS = 1000
"""Training steps where ``trainer`` names neither ``max_steps`` nor ``max_epochs``."""


def train_drafter(current: Run) -> None:
    """Train the experiment's drafter and save it; the one that is there is kept.

    Raises:
        FalconLabError: the drafter has nothing to train, or training went astray.
    """
    if current.training_done:
        current.announce(f"the drafter in {current.drafter_folder} is trained already")
        return
    experiment, components = current.experiment, current.components
    drafter = build_drafter(current)
    context = BuildContext.of(current.target, drafter)
    module = Distillation(
        current.target,
        drafter,
        components.build("objective", experiment.objective, context),
        components.build("schedule", experiment.glancing, context),
        experiment.distillation,
        seed=experiment.seed,
        max_steps=training_steps(experiment.trainer),
        hyperparameters=to_plain(experiment),
    )
    train(
        module,
        current.data,
        {**experiment.trainer, "max_steps": module.max_steps},
        current.folder,
        current.tracking.loggers,
        experiment.distillation.checkpoint_every,
        [probe] if (probe := decode_probe(current, drafter)) else [],
    )
    if not current.is_worker:
        save_drafter(
            current.drafter_folder,
            module.drafter,
            node=experiment.drafter,
            provenance=components.provenance("drafter", experiment.drafter),
            target=current.target,
            card=f"# {experiment.drafter['name']}\n\nNot measured yet.\n",
        )


def training_steps(trainer: dict[str, Any]) -> int:
    """Optimiser steps of the training."""
    steps = trainer.get("max_steps", -1)
    return int(steps) if steps > 0 else STEPS


def build_drafter(current: Run) -> Any:
    """A fresh drafter whose weights depend on the experiment's seed alone."""
    node = current.experiment.drafter
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(current.experiment.seed, "weights"))
        drafter = current.components.build("drafter", node, BuildContext(host=current.target))
    if not (is_trainable(drafter) and isinstance(drafter, TrainableDrafter)):
        raise FalconLabError(
            f"drafter.name is {node['name']}, which has nothing to train; name a trainable one, "
            "or leave the stages data and distil out"
        )
    return drafter


def decode_probe(current: Run, drafter: TrainableDrafter) -> DecodeProbe | None:
    """The callback that decodes on the way, where ``distillation.decode_every`` asks for it."""
    experiment, target = current.experiment, current.target
    config = experiment.distillation
    if not config.decode_every:
        return None
    context = BuildContext.of(target, drafter)
    build = current.components.build
    engine = SpeculativeEngine(
        target,
        drafter,
        build("tree_builder", experiment.tree, context),
        build("acceptance_rule", experiment.acceptance, context),
        build("controller", experiment.controller, context),
        decoding=experiment.decoding,
    )
    prompts = load_prompts(
        PromptsConfig(name="heldout", limit=config.decode_prompts),
        corpus=experiment.data.corpus,
        tokenizer=target.tokenizer,
        # Not the prompts of the evaluation: what is looked at in training is not held out.
        seed=derive_seed(experiment.data.seed, "probe") % 2**31,
    )
    encoded = [target.tokenizer(p.turns[0], return_tensors="pt")["input_ids"][0] for p in prompts]
    return DecodeProbe(
        engine,
        encoded,
        every=config.decode_every,
        max_new_tokens=config.decode_tokens,
        stop=StopCondition(target.eos_ids, [], target.tokenizer),
        seed=experiment.seed,
    )
