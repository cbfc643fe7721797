"""The experiment that a saved drafter's folder, or no YAML at all, stands for.

Imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from falcon_lab import __version__
from falcon_lab.config.load import load_experiment
from falcon_lab.config.overrides import Override, is_yaml, plain_overrides
from falcon_lab.config.schema import METHOD_NAME, Experiment, MethodConfig
from falcon_lab.errors import FalconLabError, did_you_mean
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.stored import read_checked, read_json

CONFIGURATION = "experiment.yaml"
"""The resolved experiment, in a run's folder."""
FACTS = "training.json"
"""The settings that decided a run's drafter, in the same folder."""
RESULTS, REPORT, ANSWERS = "results.json", "report.html", "answers"
"""What an evaluation leaves there."""
HISTORY, CHECKPOINTS, DRAFTER = "history.jsonl", "checkpoints", "drafter"
"""What a training leaves there."""
DESCRIPTION = "config.json"
"""What a saved drafter is, in its folder."""
FORMAT = 1
"""Of that description."""
DEFAULT_TREES = ("chain", "static")


@contextmanager
def opened_drafter(drafter: str | Path, components: Components | None = None) -> Iterator[Path]:
    """Give the folder of a saved drafter, by its path or by the name that a plug-in gave it.

    A name goes before a folder of that name in the working directory, as a target's does;
    ``./NAME`` is the folder.

    Args:
        drafter: path or name, as the user wrote it.
        components: the registry; None loads what is installed.

    Raises:
        FalconLabError: as inside the block, with whose drafter it is, or with the names that there
            are; also where the files of a distribution are not there.
    """
    known = components or load_components()
    found = known.brought("saved_drafter", str(drafter))
    try:
        yield Path(drafter) if found is None else found.path
    except FalconLabError as error:
        if found is not None:
            whose = f"drafter {drafter} of {found.owner}"
            raise FalconLabError(f"{whose}: {error}") from error
        names = known.names("saved_drafter")
        if os.path.lexists(drafter) or not names:
            raise
        meant = did_you_mean(str(drafter), names, all_of_them=True)
        raise FalconLabError(f"{error}, or a drafter by name{meant}") from error


def decoding_experiment(
    drafter: str | Path | None, overrides: Sequence[str], defaults: Sequence[Override] = ()
) -> Experiment:
    """Return the defaults under what a saved drafter knows of its target and the overrides.

    Args:
        drafter: its folder or name.
        overrides: of the configuration.
        defaults: of a command, where they are not the configuration's own.

    Raises:
        FalconLabError: there is no such drafter, or an override is wrong.
    """
    if drafter is None:
        return load_experiment(None, overrides, known=defaults)
    components = load_components()
    with opened_drafter(drafter, components) as folder:
        known = [*defaults, *target_overrides(folder)]
    return load_experiment(None, overrides, known=known, components=components)


def bench_experiment(
    drafter: str | Path | None, trees: Sequence[str], overrides: Sequence[str]
) -> Experiment:
    """Return the same with a method for every tree; without a drafter, with those of the overrides.

    Args:
        drafter: a saved drafter's folder or name.
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
        controller = with_own.controller if file else None
        method = replace(method_of(experiment, drafter), tree=with_own.tree, controller=controller)
        experiment.evaluation.methods[row] = method
    return experiment


def method_of(experiment: Experiment, drafter: str | Path | None) -> MethodConfig:
    """Return a method with a saved drafter; without one, with the experiment's own."""
    if drafter is None:
        return MethodConfig(drafter=experiment.drafter)
    return MethodConfig(drafter_path=str(drafter))


def key_of(override: str) -> str:
    """Return ``tree.depth`` of ``--tree.depth=6``."""
    return override.lstrip("-+").partition("=")[0]


def names_a_drafter(overrides: Sequence[str]) -> bool:
    """Return whether some override is about the drafter, as in ``drafter.name=lookup``."""
    return any(key_of(word).startswith("drafter") for word in overrides)


@dataclass(frozen=True)
class TrainedFor:
    """The target of a saved drafter."""

    name: str
    fingerprint: str
    revision: str | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class DrafterNode:
    """What the node of a saved drafter has at least; the component checks its options."""

    name: str


@dataclass(frozen=True)
class Provenance:
    """Where a component comes from; its version is null where it was not installed."""

    name: str
    distribution: str
    version: str | None = None


@dataclass(frozen=True)
class SavedDrafter:
    """What the description of a saved drafter has at least."""

    format: int
    drafter: DrafterNode
    provenance: Provenance
    target: TrainedFor


def read_description(folder: Path) -> dict[str, Any]:
    """Read a saved drafter's ``config.json``: node, provenance and the target it was trained for.

    Raises:
        FalconLabError: it is missing or is not one of ours.
    """
    path = folder / DESCRIPTION
    if not path.is_file() and (folder / DRAFTER / DESCRIPTION).is_file():
        raise FalconLabError(
            f"{folder}: a run's folder and no saved drafter; name {folder / DRAFTER}"
        )
    if not os.path.lexists(path):
        raise FalconLabError(
            f"{folder}: no saved drafter here ({DESCRIPTION} is missing); name the folder of one"
        )
    advice = "name a saved drafter, or copy or save this one again"
    found = read_checked(path, SavedDrafter, "description of a saved drafter", advice)
    if found["format"] != FORMAT:
        raise FalconLabError(
            f"{path}: has format {found['format']}, and falcon-lab {__version__} reads {FORMAT}; "
            "install the version that wrote it"
        )
    return found


def target_overrides(folder: Path) -> list[Override]:
    """Return the target that a saved drafter was trained for, as overrides.

    Inside a run's folder the run knows it completely, with the recipe of a target of one's own;
    a folder that was shared knows the target's name.

    Raises:
        FalconLabError: one of the two files is damaged.
    """
    saved, source = read_description(folder), folder.parent / FACTS
    if source.is_file():
        known = {key: v for key, v in read_facts(source).items() if key.startswith("target.")}
    else:
        source = folder / DESCRIPTION
        known = {f"target.{key}": saved["target"].get(key) for key in ("name", "revision")}
    return plain_overrides({key: v for key, v in known.items() if v is not None}, str(source))


def read_facts(path: Path) -> dict[str, Any]:
    """Read what a run wrote down of the settings that decide its drafter: full key -> value.

    Raises:
        FalconLabError: the file is damaged.
    """
    advice = (
        f"{CONFIGURATION} beside it says the same, so that it may be deleted where that is whole"
    )
    return read_json(path, dict[str, Any], "settings of a training", advice)


def use_drafter_of(run_folder: Path, experiment: Experiment) -> None:
    """Let the methods that rely on the run's own drafter find it from another folder."""
    for method in experiment.evaluation.methods.values():
        if method.drafter is None and method.drafter_path is None and method.engine is None:
            method.drafter_path = str(run_folder / DRAFTER)


def run_experiment(
    folder: Path, overrides: Sequence[str | Override], *, components: Components | None = None
) -> Experiment:
    """Return the experiment that a run wrote down in its folder, under overrides.

    Raises:
        ConfigError: as of ``load_experiment``; also where the file asks this machine for values,
            which what a run writes never does.
    """
    path = folder / CONFIGURATION
    return load_experiment(path, overrides, components=components, of_a_run=True)


def saved_experiment(what: str | Path, overrides: Sequence[str]) -> Experiment:
    """Return the experiment that evaluates a saved drafter or a run.

    A run's folder is measured as its own experiment says. A drafter that was shared, in a folder
    or by name, is measured by its chain and its default tree, into ``runs/evaluate-NAME``. Whether
    anything goes online, and to whom, is the reader's to say and not the folder's.

    Args:
        what: a run's folder, or a saved drafter's folder or name.
        overrides: of the configuration.

    Raises:
        FalconLabError: the folder holds neither, a file is damaged, or an override is wrong.
    """
    stages, components = ["evaluate", "report"], load_components()
    named = components.knows("saved_drafter", str(what))
    for run_folder in () if named else (Path(what), Path(what).parent):
        if (run_folder / CONFIGURATION).exists():
            fixed: dict[str, Any] = {"stages": stages, "out": str(run_folder), "seeds": []}
            fixed |= {"wandb.mode": None, "wandb.entity": None}
            known = plain_overrides(fixed, str(run_folder))
            experiment = run_experiment(run_folder, [*known, *overrides], components=components)
            if Path(experiment.out) != run_folder:
                use_drafter_of(run_folder, experiment)
            return experiment
    path, methods = str(what), "evaluation.methods"
    name = f"evaluate-{Path(what).resolve().name}"
    fixed = {
        "name": name,
        "stages": stages,
        f"{methods}.chain.drafter_path": path,
        f"{methods}.chain.tree.name": "chain",
        f"{methods}.tree.drafter_path": path,
        f"{methods}.tree.tree.name": "static",
    }
    with opened_drafter(what, components) as folder:
        known = [*target_overrides(folder), *plain_overrides(fixed, path)]
    return load_experiment(None, overrides, known=known, components=components)
