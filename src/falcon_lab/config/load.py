"""From a YAML and overrides to one typed experiment, checked before anything heavy is imported.

Overrides are ``key=value`` or ``--key=value``, in the words of a shell or of a W&B sweep. Changing
a component by name (``tree.name=static``) drops the options that the file gave to the component it
replaces: they belonged to that one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from falcon_lab.config.overrides import Origin, Override, apply_overrides, parse_overrides
from falcon_lab.config.schema import Experiment
from falcon_lab.config.trainer import check_trainer
from falcon_lab.errors import ConfigError
from falcon_lab.fields import read_yaml, resolve, shape, to_yaml
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components

NODES = {
    "drafter": "drafter",
    "glancing": "schedule",
    "objective": "objective",
    "tree": "tree_builder",
    "acceptance": "acceptance_rule",
    "controller": "controller",
}
"""Key of a component's node -> kind of component."""

OF_COMPARISONS = ("base", "heads")
"""Keys by which a YAML is not an experiment's (``comparing/loading.py``)."""

METHOD_NODES = ("drafter", "tree", "acceptance", "controller")
"""Those that a row of ``evaluation.methods`` may replace."""


DEFAULT_NAMES = {name: getattr(Experiment(), name)["name"] for name in NODES}
"""Key of a component's node -> the component that an experiment has without one."""


def load_experiment(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    components: Components | None = None,
) -> Experiment:
    """The validated experiment; component nodes hold all their options.

    Args:
        path: the YAML; None takes every default.
        overrides: ``key=value`` or ``--key=value``.
        components: the registry; None loads what is installed.

    Raises:
        ConfigError: one line with the file or override, the full key and the nearest known one.
    """
    return _load(path, parse_overrides(overrides), components or load_components())


def variants(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    components: Components | None = None,
) -> list[tuple[str, int, Experiment]]:
    """Every (variant, seed) of an experiment, each one loadable and in a folder of its own.

    A variant's own overrides win over the command line's. Without ``variants`` and ``seeds`` it
    is the experiment alone, as it stands.

    Raises:
        ConfigError: a variant's override is wrong; it is named as the variant's.
    """
    components = components or load_components()
    base = load_experiment(path, overrides, components=components)
    if not base.variants and not base.seeds:
        return [(base.name, base.seed, base)]
    own = parse_overrides(overrides)
    loaded = []
    for name, texts in (base.variants or {base.name: []}).items():
        changed = parse_overrides(texts, label=f"{path}: variants.{name}")
        for seed in base.seeds or [base.seed]:
            alone = ["variants={}", "seeds=[]", *([f"seed={seed}"] if base.seeds else [])]
            experiment = _load(path, own, components, [*changed, *parse_overrides(alone)])
            experiment.out = f"{experiment.out}/{name}-seed{experiment.seed}"
            loaded.append((name, experiment.seed, experiment))
    return loaded


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """The experiment as nested plain values, for W&B, results and checkpoints."""
    return dataclasses.asdict(experiment)


def dump(experiment: Experiment) -> str:
    """The experiment as YAML that loads to the same experiment."""
    return to_yaml(to_plain(experiment))


# --- the steps ----------------------------------------------------------------------------------


def _load(
    path: str | Path | None,
    overrides: list[Override],
    components: Components,
    later: Sequence[Override] = (),
) -> Experiment:
    tree, lines = read_yaml(Path(path)) if path else ({}, {})
    origin = Origin(str(path) if path else "the command line", [*overrides, *later])
    if path:
        origin.add(Path(path), lines)
    try:
        for key in OF_COMPARISONS:
            if key in tree:
                raise ConfigError(key, f"is a comparison's: falcon-lab compare {path}")
        for layer in (overrides, later):
            apply_overrides(tree, layer, DEFAULT_NAMES)
        return experiment_of(tree, components)
    except ConfigError as error:
        raise error.at(origin.blame(error)) from None


def experiment_of(tree: dict[str, Any], components: Components) -> Experiment:
    """The experiment that a plain tree describes, to which the tree's defaults are added.

    Raises:
        ConfigError: without the place.
    """
    shape(tree, Experiment, "")  # keys first: the rest relies on sections being mappings
    _add_defaults(tree, components)
    experiment = resolve(Experiment, tree)
    for owner, name, key in _nodes(experiment):
        node = getattr(owner, name)
        if owner is experiment or not _may_be_absent(vars(owner), node, name, components):
            setattr(owner, name, components.check(NODES[name], node, key))
    experiment.trainer = check_trainer(experiment.trainer)
    return experiment


def _add_defaults(tree: dict[str, Any], components: Components) -> None:
    """Give every component its defaults, so that ``${drafter.block}`` can mean one."""
    for name in NODES:
        node = tree.get(name, {})
        if isinstance(node, dict):
            node = {"name": DEFAULT_NAMES[name], **node}
            tree[name] = _with_defaults(node, name, name, components)
    for row, method in tree.get("evaluation", {}).get("methods", {}).items():
        for name in METHOD_NODES:
            node, key = method.get(name), f"evaluation.methods.{row}.{name}"
            if isinstance(node, dict) and not _may_be_absent(method, node, name, components):
                method[name] = _with_defaults(node, name, key, components)


def _with_defaults(
    node: dict[str, Any], name: str, key: str, components: Components
) -> dict[str, Any]:
    if "${" in str(node.get("name")):
        return node
    component = components.named(NODES[name], node, key)
    return {**components.defaults(NODES[name], component.full_name), **node}


def _may_be_absent(
    method: dict[str, Any], node: dict[str, Any], name: str, components: Components
) -> bool:
    """Whether a row is optional and its plug-in is not installed."""
    optional = str(method.get("optional", False)).lower() == "true"
    return optional and not components.knows(NODES[name], str(node.get("name")))


def _nodes(experiment: Experiment) -> Iterator[tuple[Any, str, str]]:
    """Owner, attribute and full key of every component node."""
    for name in NODES:
        yield experiment, name, name
    for row, method in experiment.evaluation.methods.items():
        for name in METHOD_NODES:
            if getattr(method, name) is not None:
                yield method, name, f"evaluation.methods.{row}.{name}"
