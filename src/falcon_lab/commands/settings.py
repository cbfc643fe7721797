"""What ``generate``, ``check`` and ``bench`` decode with: an experiment without a YAML.

Imports no torch.

The engine that ``generate`` and ``check`` decode with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.load import load_experiment
from falcon_lab.config.overrides import is_yaml
from falcon_lab.config.schema import Experiment, MethodConfig
from falcon_lab.decoding.compiling import choose_target
from falcon_lab.errors import FalconLabError
from falcon_lab.measure.engines import Methods, add_method
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import ensure_target

if TYPE_CHECKING:
    from falcon_lab.decoding.engine import SpeculativeEngine
    from falcon_lab.model.target import Target

DEFAULT_TREES = ("chain", "static")


def decoding_experiment(drafter: Path | None, overrides: Sequence[str]) -> Experiment:
    """Defaults, then what the drafter's folder says of its target, then the overrides.

    Raises:
        FalconLabError: there is no drafter in the folder, or an override is wrong.
    """
    known = [] if drafter is None else target_overrides(drafter)
    return load_experiment(None, [*known, *overrides])


def bench_experiment(
    drafter: Path | None, trees: Sequence[str], overrides: Sequence[str]
) -> Experiment:
    """The same, with a method for every tree; without a drafter there are only those of the
    overrides.

    Args:
        drafter: a saved drafter's folder.
        trees: ``NAME`` or ``NAME,key=value,…``, or a YAML with ``tree``, and ``controller`` if it
            brings its own; none stands for a chain and the default tree.
        overrides: of the configuration; with a ``tree.name`` among them, those of the tree are
            the experiment's own and no row's.

    Raises:
        FalconLabError: as above, or trees without a drafter.
    """
    experiment = decoding_experiment(drafter, overrides)
    if drafter is None and not names_a_drafter(overrides):
        if trees:
            raise FalconLabError("--tree needs a drafter: --drafter DIR or drafter.name=NAME")
        return experiment
    shared = overrides
    if any(key_of(word) == "tree.name" for word in overrides):
        shared = [word for word in overrides if not key_of(word).startswith("tree.")]
    for text in trees or DEFAULT_TREES:
        name, *options = re.split(r",(?=[\w.]+=)", text)
        file = is_yaml(name)
        own = [name if file else f"tree.name={name}", *(f"tree.{option}" for option in options)]
        with_own = decoding_experiment(drafter, [*shared, *own])
        experiment.evaluation.methods[" ".join([name, *options])] = MethodConfig(
            drafter=None if drafter else experiment.drafter,
            drafter_path=str(drafter) if drafter else None,
            tree=with_own.tree,
            controller=with_own.controller if file else None,
        )
    return experiment


def key_of(override: str) -> str:
    """``tree.depth`` of ``--tree.depth=6``."""
    return override.lstrip("-+").partition("=")[0]


def names_a_drafter(overrides: Sequence[str]) -> bool:
    """Whether some override is about the drafter, as in ``drafter.name=lookup``."""
    return any(key_of(word).startswith("drafter") for word in overrides)


def target_overrides(folder: Path) -> list[str]:
    """The target that a saved drafter was trained for, as overrides.

    Inside a run's folder the run knows it completely, with the recipe of a target of one's own;
    a folder that was shared knows the target's name.
    """
    saved = read_json(folder / "config.json")
    facts = folder.parent / "training.json"
    if facts.is_file():
        known = {k: v for k, v in read_json(facts).items() if k.startswith("target.")}
    else:
        known = {f"target.{key}": saved.get("target", {}).get(key) for key in ("name", "revision")}
    return [f"{key}={json.dumps(value)}" for key, value in known.items() if value is not None]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FalconLabError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FalconLabError(f"{path}: no saved drafter's description ({error})") from error
    if not isinstance(content, dict):
        raise FalconLabError(f"{path}: not a JSON object")
    return content


def load(experiment: Experiment, announce: Callable[[str], None]) -> Target:
    """The experiment's target on its device."""
    target: Target = ensure_target(experiment.target, announce)
    return choose_target(target, experiment.decoding, announce)


def speculative(
    experiment: Experiment, target: Target, drafter: Path | None, overrides: Sequence[str]
) -> SpeculativeEngine | None:
    """The engine with the saved drafter, or with the one that the overrides name; None without."""
    if drafter is None and not names_a_drafter(overrides):
        return None
    config = MethodConfig(
        drafter=None if drafter else experiment.drafter,
        drafter_path=str(drafter) if drafter else None,
    )
    methods = Methods()
    nowhere = Path()  # no run has trained anything here
    add_method(methods, "it", config, experiment, target, load_components(), nowhere)
    return methods.engines["it"]
