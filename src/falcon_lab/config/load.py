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
from falcon_lab.config.schema import DistillationConfig, Experiment, MethodConfig
from falcon_lab.config.trainer import MODEL_PARALLEL, check_trainer, model_parallel
from falcon_lab.errors import ConfigError
from falcon_lab.fields import read_yaml, refuse_resolvers, resolve, shape, to_yaml
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import TuningOptions
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

OF_COMPARISONS = ("base", "heads", "variants")
"""Keys by which a YAML is not an experiment's (``studies/compare/loading.py``)."""

ENGINE = "engine"
"""Key of the node that a method may have in place of all others."""

METHOD_NODES = ("drafter", "tree", "acceptance", "controller", ENGINE)
"""Those that a method of ``evaluation.methods`` may have of its own."""

TUNE = "tune"
"""Key of the node that ``target`` may have."""

KIND_OF = {**NODES, ENGINE: "engine", TUNE: "tuner"}
"""Key of any node -> kind of component."""


DEFAULT_NAMES = {name: getattr(Experiment(), name)["name"] for name in NODES}
"""Key of a component's node -> the component that an experiment has without one."""


def load_experiment(
    path: str | Path | None,
    overrides: Sequence[str | Override] = (),
    *,
    known: Sequence[str | Override] = (),
    components: Components | None = None,
    of_a_run: bool = False,
) -> Experiment:
    """Return the validated experiment; component nodes hold all their options.

    Args:
        path: the YAML; None: every default.
        overrides: ``key=value`` or ``--key=value``, or what was read from a file.
        known: what is known besides, in the same form; it stands as if in the YAML.
        components: the registry; None loads what is installed.
        of_a_run: whether the YAML is the one that a run wrote down. That of a stranger's run is
            measured, not trusted: it cannot read the environment.

    Raises:
        ConfigError: one line with the file or override, the full key and the nearest known one.
    """
    components, own = components or load_components(), parse_overrides(overrides)
    ours = parse_overrides(known)
    tree, lines = read_yaml(Path(path)) if path else ({}, {})
    origin = Origin(str(path) if path else "the command line", [*ours, *own])
    if path:
        origin.add(Path(path), lines)
    try:
        if of_a_run:
            refuse_resolvers(tree, "")
        apply_overrides(tree, ours, DEFAULT_NAMES)
        apply_overrides(tree, own, DEFAULT_NAMES)
        for key in OF_COMPARISONS:
            if tree.get(key):
                raise ConfigError(key, f"is a comparison's: falcon-lab compare {path}")
            tree.pop(key, None)  # an empty one is what older versions wrote down
        return experiment_of(tree, components)
    except ConfigError as error:
        raise error.at(origin.blame(error)) from None


def to_plain(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment as nested plain values, for W&B, results and checkpoints."""
    return dataclasses.asdict(experiment)


def dump(experiment: Experiment) -> str:
    """Return the experiment as YAML that loads to the same experiment."""
    return to_yaml(to_plain(experiment))


# --- the steps ----------------------------------------------------------------------------------


def experiment_of(tree: dict[str, Any], components: Components) -> Experiment:
    """Return the experiment that a plain tree describes; components' defaults are added to it.

    Raises:
        ConfigError: without the place.
    """
    shape(tree, Experiment, "")  # keys first: the rest relies on sections being mappings
    _add_defaults(tree, components)
    experiment = resolve(Experiment, tree)
    for owner, name, key in _nodes(experiment):
        node = getattr(owner, name)
        if not isinstance(owner, MethodConfig) or not _may_be_absent(
            vars(owner), node, name, components
        ):
            setattr(owner, name, components.check(KIND_OF[name], node, key))
    _check_engines(experiment)
    _check_start(experiment.distillation)
    _complete_tuning(experiment)
    experiment.trainer = check_trainer(experiment.trainer)
    if "distil" in experiment.stages and model_parallel(experiment.trainer) is not None:
        _check_shared_target(experiment)
    return experiment


def _check_start(config: DistillationConfig) -> None:
    """Refuse two ways of beginning a training.

    Raises:
        ConfigError: both are asked for.
    """
    if config.start is not None and config.least_squares:
        raise ConfigError(
            "distillation.least_squares",
            f"is {config.least_squares}, and distillation.start brings weights to begin with; set "
            "it to 0, or leave distillation.start out",
        )


def _check_shared_target(experiment: Experiment) -> None:
    """Refuse what needs a whole target in one process, where a training shares it.

    Raises:
        ConfigError: for the first of these.
    """
    data, config = experiment.data, experiment.distillation
    whole = "a target that processes share"
    refusals = (
        (
            "stages",
            "evaluate" in experiment.stages,
            "has evaluate, which one process does with a whole target; train with "
            "stages=[target,data,distil], then falcon-lab evaluate the run's folder",
        ),
        ("distillation.decode_every", config.decode_every, f"decodes with {whole}; set it to 0"),
        ("distillation.compile", config.compile, f"is not combined with {whole}; set it to false"),
        (
            "distillation.least_squares",
            config.least_squares,
            f"needs the target before it is shared; set it to 0, or start without {MODEL_PARALLEL}",
        ),
        (
            "data.feature_store",
            data.feature_store,
            "has the target's features, so that nothing is to be shared; set it to null, or leave "
            f"trainer.strategy={MODEL_PARALLEL} out",
        ),
        (
            "data.regenerate",
            data.regenerate and data.server is None,
            f"has {whole} write; name a server (data.server.url), or write chats before with "
            "falcon-lab dialogues",
        ),
    )
    for key, found, problem in refusals:
        if found:
            raise ConfigError(key, f"{problem} (trainer.strategy={MODEL_PARALLEL})")


def _add_defaults(tree: dict[str, Any], components: Components) -> None:
    """Give every component its defaults, so that ``${drafter.block}`` can mean one."""
    for name in NODES:
        node = tree.get(name, {})
        if isinstance(node, dict):
            node = {"name": DEFAULT_NAMES[name], **node}
            tree[name] = _with_defaults(node, name, name, components)
    section = tree.get("target", {})
    if isinstance(section, dict) and isinstance(section.get(TUNE), dict):
        section[TUNE] = _with_defaults(section[TUNE], TUNE, f"target.{TUNE}", components)
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
    component = components.named(KIND_OF[name], node, key)
    return {**components.defaults(KIND_OF[name], component.full_name, key), **node}


def _complete_tuning(experiment: Experiment) -> None:
    """Have a tuner without a corpus of its own read the experiment's.

    Raises:
        ConfigError: its options are none of a tuner.
    """
    tune = experiment.target.tune
    if tune is None:
        return
    if missing := [
        field.name for field in dataclasses.fields(TuningOptions) if field.name not in tune
    ]:
        problem = f"lacks {missing[0]}; the options of a tuner derive from plugins.hooks"
        raise ConfigError(f"target.{TUNE}", f"{problem}.TuningOptions")
    if tune["corpus"] is None:
        data = experiment.data
        tune |= {"corpus": data.corpus, "chat_template": data.chat_template}


def _check_engines(experiment: Experiment) -> None:
    """Refuse a method that has an engine and what an engine has not.

    Raises:
        ConfigError: with the place.
    """
    for row, method in experiment.evaluation.methods.items():
        others = [key for key in ("drafter_path", *METHOD_NODES) if key != ENGINE]
        given = [key for key in others if getattr(method, key) is not None]
        if method.engine is not None and given:
            raise ConfigError(
                f"evaluation.methods.{row}.{given[0]}",
                "this method has an engine, which decodes in its own way; leave one of them out",
            )


def _may_be_absent(
    method: dict[str, Any], node: dict[str, Any], name: str, components: Components
) -> bool:
    """Return whether a method is optional and its plug-in is not installed."""
    optional = str(method.get("optional", False)).lower() == "true"
    return optional and components.lacks(KIND_OF[name], node)


def _nodes(experiment: Experiment) -> Iterator[tuple[Any, str, str]]:
    """Yield owner, attribute and full key of every component node."""
    for name in NODES:
        yield experiment, name, name
    if experiment.target.tune is not None:
        yield experiment.target, TUNE, f"target.{TUNE}"
    for row, method in experiment.evaluation.methods.items():
        for name in METHOD_NODES:
            if getattr(method, name) is not None:
                yield method, name, f"evaluation.methods.{row}.{name}"
