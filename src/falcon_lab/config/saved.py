"""The experiment that a saved drafter's folder, or no YAML at all, stands for.

Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_lab.config.load import load_experiment
from falcon_lab.config.overrides import is_yaml
from falcon_lab.config.schema import METHOD_NAME, Experiment, MethodConfig
from falcon_lab.errors import FalconLabError

CONFIGURATION = "experiment.yaml"
"""The resolved experiment, in a run's folder."""
DEFAULT_TREES = ("chain", "static")


def decoding_experiment(drafter: Path | None, overrides: Sequence[str]) -> Experiment:
    """Return the defaults under what the drafter's folder knows of its target and the overrides.

    Raises:
        FalconLabError: there is no drafter in the folder, or an override is wrong.
    """
    known = [] if drafter is None else target_overrides(drafter)
    return load_experiment(None, [*known, *overrides])


def bench_experiment(
    drafter: Path | None, trees: Sequence[str], overrides: Sequence[str]
) -> Experiment:
    """Return the same with a method for every tree; without a drafter, with those of the overrides.

    Args:
        drafter: a saved drafter's folder.
        trees: ``NAME`` or ``NAME,key=value,…``, or a YAML with ``tree``, and ``controller`` if it
            brings its own; none stands for a chain and the default tree.
        overrides: of the configuration; with a ``tree.name`` among them, those of the tree are
            the experiment's own and no method's.

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
        row = " ".join([name, *options])
        if re.fullmatch(METHOD_NAME.reserved, row):
            raise FalconLabError(
                f"--tree {text}: a row of that name is measured in any case; write the tree's "
                "full name, DISTRIBUTION/NAME (falcon-lab plugins lists it)"
            )
        file = is_yaml(name)
        own = [name if file else f"tree.name={name}", *(f"tree.{option}" for option in options)]
        with_own = decoding_experiment(drafter, [*shared, *own])
        experiment.evaluation.methods[row] = MethodConfig(
            drafter=None if drafter else experiment.drafter,
            drafter_path=str(drafter) if drafter else None,
            tree=with_own.tree,
            controller=with_own.controller if file else None,
        )
    return experiment


def key_of(override: str) -> str:
    """Return ``tree.depth`` of ``--tree.depth=6``."""
    return override.lstrip("-+").partition("=")[0]


def names_a_drafter(overrides: Sequence[str]) -> bool:
    """Return whether some override is about the drafter, as in ``drafter.name=lookup``."""
    return any(key_of(word).startswith("drafter") for word in overrides)


def target_overrides(folder: Path) -> list[str]:
    """Return the target that a saved drafter was trained for, as overrides.

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
    """Read a JSON object.

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


def use_drafter_of(run_folder: Path, experiment: Experiment) -> None:
    """Let the methods that rely on the run's own drafter find it from another folder."""
    for method in experiment.evaluation.methods.values():
        if method.drafter is None and method.drafter_path is None:
            method.drafter_path = str(run_folder / "drafter")


def saved_experiment(folder: Path, overrides: Sequence[str]) -> Experiment:
    """Return the experiment that evaluates what is in ``folder``.

    A run's folder is measured as its own experiment says. A drafter's folder that was shared is
    measured by its chain and its default tree, into ``runs/evaluate-NAME``. Whether anything goes
    online, and to whom, is the reader's to say and not the folder's.
    """
    stages = "stages=[evaluate, report]"
    for run_folder in (folder, folder.parent):
        if (run_folder / CONFIGURATION).exists():
            place = f"out={json.dumps(str(run_folder))}"
            fixed = [stages, place, "seeds=[]", "wandb.mode=null", "wandb.entity=null"]
            experiment = load_experiment(run_folder / CONFIGURATION, [*fixed, *overrides])
            if Path(experiment.out) != run_folder:
                use_drafter_of(run_folder, experiment)
            return experiment
    path = json.dumps(str(folder))
    rows = [
        f"evaluation.methods.chain.drafter_path={path}",
        "evaluation.methods.chain.tree.name=chain",
        f"evaluation.methods.tree.drafter_path={path}",
        "evaluation.methods.tree.tree.name=static",
    ]
    name = f"evaluate-{folder.resolve().name}"
    known = [f"name={json.dumps(name)}", stages, *target_overrides(folder), *rows]
    return load_experiment(None, [*known, *overrides])
