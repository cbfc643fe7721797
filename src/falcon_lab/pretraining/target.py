"""Targets by name: built in, pre-trained by a recipe, or loaded from the hub or a folder.

A pre-trained target is made once and kept in the cache under the fingerprint of its recipe. Its
making can be killed at any moment: the same call resumes where it stopped.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import PretrainingConfig, TargetConfig
from falcon_lab.fields import read_yaml, resolve
from falcon_lab.files import about, cache_folder, locked, make_folder
from falcon_lab.pretraining.quality import read_figures

log = logging.getLogger(__name__)

BUILT_IN = ("tiny-code",)

Announce = Callable[[str], None]
"""Called with one line for the user."""
Make = Callable[[str, PretrainingConfig, Path, Announce], None]
"""Makes the target of a recipe in a folder."""


def built_in_recipe(name: str) -> PretrainingConfig:
    """Read the recipe that ships with the package."""
    shipped = resources.files("falcon_lab.pretraining").joinpath(f"recipes/{name}.yaml")
    with resources.as_file(shipped) as path:
        tree, _ = read_yaml(path)
    return resolve(PretrainingConfig, tree)


def recipe_of(config: TargetConfig) -> PretrainingConfig | None:
    """Return the recipe that a target is pre-trained by, or None for one that is loaded."""
    if config.pretraining is not None:
        return config.pretraining
    return built_in_recipe(config.name) if config.name in BUILT_IN else None


def recipe_fingerprint(recipe: PretrainingConfig) -> str:
    """Return twelve hex digits that change with whatever changes the weights."""
    from falcon_lab.data.corpora import corpus_fingerprint

    facts = dataclasses.asdict(recipe)
    for judged_later in ("gate", "checkpoint_every"):
        del facts[judged_later]
    facts["corpus_fingerprint"] = corpus_fingerprint(recipe.corpus)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def target_folder(name: str, recipe: PretrainingConfig) -> Path:
    """Return the folder of the finished target of a recipe."""
    label = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    return cache_folder() / "targets" / f"{label}-{recipe_fingerprint(recipe)}"


def ensure_target(config: TargetConfig, announce: Announce = log.info) -> Any:
    """Load the target of a configuration; train it first if need be.

    Raises:
        FalconLabError: when it cannot be loaded, with the reason.
    """
    from falcon_lab.model.loading import load_target

    recipe = recipe_of(config)
    if recipe is None:
        return load_target(config, announce)
    folder = target_folder(config.name, recipe)
    ensure_pretrained(config.name, recipe, folder, announce)
    loaded = dataclasses.replace(config, name=str(folder), pretraining=None)
    target = load_target(loaded, announce)
    target.name = config.name
    return target


def ensure_pretrained(
    name: str,
    recipe: PretrainingConfig,
    folder: Path,
    announce: Announce,
    make: Make | None = None,
) -> None:
    """Train the target unless ``folder`` has it already. Two processes never both train it.

    In a distributed training the first process of each machine does, and the others wait.

    Args:
        name: of the target, for messages.
        recipe: what is made.
        folder: of the finished target.
        announce: is called with one line for the user.
        make: makes the target; None: ``train_target``.
    """
    while is_worker() and not is_finished(folder):  # a launcher ends us if the first one fails
        time.sleep(0.2)
    if is_finished(folder):
        return
    make_folder(folder.parent)
    with locked(folder.with_name(f"{folder.name}.lock"), busy=None), about(folder):
        if is_finished(folder):
            return
        partial = folder.with_name(folder.name + ".partial")
        if folder.exists():  # damaged since: what is whole in it is kept
            shutil.rmtree(partial, ignore_errors=True)
            folder.rename(partial)
        announce(f"target {name}: training it once ({recipe.steps} steps), kept in {folder}")
        (make or train_target)(name, recipe, partial, announce)
        shutil.rmtree(partial / "checkpoints", ignore_errors=True)
        partial.rename(folder)


def is_finished(folder: Path) -> bool:
    """Return whether the folder has a target with its judgement, which is written last."""
    return read_figures(folder / "quality.json") is not None


def is_worker() -> bool:
    """Return whether another process of this machine leads."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def train_target(name: str, recipe: PretrainingConfig, folder: Path, announce: Announce) -> None:
    """Make tokenizer and model, train and judge: a Hugging Face folder with quality.json."""
    from falcon_lab.pretraining.training import judged_quality, trained_model, trained_tokenizer

    make_folder(folder)
    tokenizer = trained_tokenizer(recipe, folder)
    model = trained_model(recipe, tokenizer, folder)
    quality = judged_quality(name, recipe, model, tokenizer, folder)
    announce(f"target {name}: {quality.sentence}")


def stored_quality(config: TargetConfig) -> dict[str, Any] | None:
    """Return ``quality.json`` of a pre-trained target, or None for one loaded from elsewhere."""
    recipe = recipe_of(config)
    if recipe is None:
        return None
    return read_figures(target_folder(config.name, recipe) / "quality.json")
