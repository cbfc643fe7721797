"""Read a comparison from a YAML, or from the folders of runs that are there.

The YAML is an experiment with ``heads`` and what else a comparison has.

    base: ../compare.yaml      # optional: the file whose keys this one overrides
    heads: {falcon: {drafter: {name: falcon, block: 2}}, …}
    only: [falcon, medusa]     # of the heads, also of those of the base

In the shorter form, which ``falcon-lab run`` reads too, a head is a list of overrides; without it,
``seeds`` make one head.

    variants: {csgd: [], none: [glancing.name=none]}

All other keys are an experiment's. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from falcon_lab.config.load import DEFAULT_NAMES, NODES, experiment_of
from falcon_lab.config.overrides import (
    Origin,
    Override,
    apply_overrides,
    parse_overrides,
    plain_overrides,
)
from falcon_lab.config.saved import CONFIGURATION, DESCRIPTION, DRAFTER, run_experiment
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean, join
from falcon_lab.fields import read_yaml, resolve
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.studies.compare.paper import check_paper
from falcon_lab.studies.compare.plan import (
    BEST,
    COMPARISON_KEYS,
    DECODING_NODES,
    HEAD_NAME,
    HEAD_NODES,
    SHARED,
    ComparisonConfig,
    Head,
    Plan,
    parse_budget,
    saved_parts,
)

BASE, VARIANTS = "base", "variants"
HEAD_KEYS = (*HEAD_NODES, "optional", "train", "runs", "drafters_of", "spend")
TRAINING = ("target", "data", "distil")
BUDGETS = ["chain-4", "tree-16", "own"]
"""Budgets that runs are compared with by default."""


def load_plan(
    path: Path, overrides: Sequence[str] = (), *, components: Components | None = None
) -> Plan:
    """The comparison that a YAML describes.

    Args:
        path: the YAML.
        overrides: ``key=value``, as for an experiment; ``heads.NAME.drafter.block=3`` too.
        components: the registry; None loads what is installed.

    Raises:
        ConfigError: one line with the file or override, the full key and the nearest known one.
    """
    components = components or load_components()
    origin = Origin(str(path), parse_overrides(overrides))
    short = False
    try:
        tree = _read(path, origin)
        apply_overrides(tree, origin.overrides, DEFAULT_NAMES)
        short = _take_short_form(tree)
        section = {key: tree.pop(key) for key in COMPARISON_KEYS if key in tree}
        base = experiment_of(deepcopy(tree), components)
        return _plan(base, resolve(ComparisonConfig, section), tree, components)
    except ConfigError as error:
        if short and error.key.startswith("heads."):  # they stand under another key
            error = ConfigError(error.key.replace("heads", VARIANTS, 1), error.problem)
        raise error.at(origin.blame(error)) from None


def is_short_form(path: Path, overrides: Sequence[str]) -> bool:
    """Return whether an experiment's YAML is a comparison: it has variants, or seeds."""
    try:
        tree, _ = read_yaml(path)
        apply_overrides(tree, parse_overrides(overrides), DEFAULT_NAMES)
    except ConfigError:
        return False  # loading it names what is wrong, and where
    return not tree.get("heads") and bool(tree.get(VARIANTS) or tree.get("seeds"))


def _take_short_form(tree: dict[str, Any]) -> bool:
    """Turn ``variants`` (name -> overrides) into heads, and return whether there were any.

    An experiment with ``seeds`` and neither of both is the only head.
    """
    variants = tree.pop(VARIANTS, None) or {}
    if variants and tree.get("heads"):
        raise ConfigError(VARIANTS, "a comparison has heads instead")
    if not isinstance(variants, Mapping):
        raise ConfigError(VARIANTS, "must be a mapping of names to lists of overrides")
    for name, texts in variants.items():
        key, node = join(VARIANTS, name), dict[str, Any]()
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(key, "must be a list of overrides, as in [drafter.block=3]")
        apply_overrides(node, parse_overrides(texts, label=key), DEFAULT_NAMES)
        tree.setdefault("heads", {})[name] = node
    if not tree.get("heads") and tree.get("seeds"):
        tree["heads"] = {tree.get("name", "experiment"): {}}
    return bool(variants)


def _read(path: Path, origin: Origin, *, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file's tree, merged over that of its base."""
    own, lines = read_yaml(path)
    base = own.pop(BASE, None)
    if base is None:
        origin.add(path, lines)
        return own
    if not isinstance(base, str):
        raise ConfigError(BASE, f"must be the name of a YAML, not {base!r}", str(path))
    below = path.parent / base
    if below.resolve() in above:
        raise ConfigError(BASE, f"{base} is based on this file itself", str(path))
    tree = _read(below, origin, above=(*above, path.resolve()))
    origin.add(path, lines)
    layer = [Override(key, value, f"{path}: {key}") for key, value in own.items()]
    apply_overrides(tree, layer, DEFAULT_NAMES)
    return tree


def _plan(
    base: Experiment, config: ComparisonConfig, tree: Mapping[str, Any], components: Components
) -> Plan:
    heads: list[Head] = []
    left_out: dict[str, str] = {}
    for name in config.only or config.heads:
        if name not in config.heads:
            raise ConfigError("only", f"no head {name!r}{did_you_mean(name, config.heads)}")
        node = config.heads[name]
        lender = _lender(name, config)
        needed = [name, lender] if lender else [name]
        if why := next(filter(None, (_absent(n, config.heads[n], components) for n in needed)), ""):
            left_out[name] = why
            continue
        head = _Loader(name, node, base, tree, components).head()
        if lender:
            owner = _Loader(lender, config.heads[lender], base, tree, components).head()
            head = _borrowing(head, owner, shared=lender in (config.only or config.heads))
        heads.append(head)
    check_paper(config)
    return finished_plan(base, config, heads, left_out)


def finished_plan(
    base: Experiment,
    config: ComparisonConfig,
    heads: list[Head],
    left_out: dict[str, str] | None = None,
) -> Plan:
    """The plan, its budgets read and its numbers checked.

    Raises:
        ConfigError: without the place.
    """
    budgets = [parse_budget(w, f"budgets[{i}]") for i, w in enumerate(config.budgets)]
    grid = [parse_budget(w, f"tuning.grid[{i}]") for i, w in enumerate(config.tuning.grid)]
    for key, values in (("budgets", config.budgets), ("temperatures", config.temperatures)):
        if not values:
            raise ConfigError(key, "is empty; give at least one")
    if not grid or any(budget.word == BEST for budget in grid):
        raise ConfigError("tuning.grid", "needs budgets to choose from, of which none is best")
    if not heads:
        raise ConfigError("heads", "no head is left to be compared")
    return Plan(base, config, budgets, grid, heads, left_out or {})


def _lender(name: str, config: ComparisonConfig) -> str:
    """Return the head whose drafters ``name`` uses; empty for one with its own."""
    node = config.heads[name]
    if "drafters_of" not in node:
        return ""
    key, owner = f"heads.{name}", str(node["drafters_of"])
    for part in node:
        if part in HEAD_NODES and part not in DECODING_NODES:
            raise ConfigError(join(key, part), f"the drafters are those of {owner}, trained there")
    lenders = [
        other
        for other, its in config.heads.items()
        if "drafters_of" not in its and its.get("train") is not False
    ]
    if owner not in lenders:
        problem = f"no head {owner!r} with trained drafters of its own"
        raise ConfigError(join(key, "drafters_of"), f"{problem}{did_you_mean(owner, lenders)}")
    return owner


def _borrowing(head: Head, owner: Head, *, shared: bool) -> Head:
    """The head with the owner's trainings, from which it differs in decoding alone.

    ``shared``: the owner is compared too, and trains them.
    """
    own = {part: getattr(head.experiment, part) for part in DECODING_NODES}
    experiments = {seed: replace(run, **own) for seed, run in owner.experiments.items()}
    lender = owner.name if shared else ""
    return replace(
        head,
        trains=True,
        experiments=experiments,
        folders=owner.folders,
        drafters_of=lender,
        given=owner.given,
    )


def _absent(name: str, node: Mapping[str, Any], components: Components) -> str:
    """Why an optional head cannot be compared; empty when it can, or when it is not optional."""
    if node.get("optional") is not True:
        return ""
    for key, kind in NODES.items():
        part = node.get(key)
        if not isinstance(part, Mapping) or not isinstance(named := part.get("name"), str):
            continue
        if not components.knows(kind, named):
            return f"no {kind} named {named!r} is installed"
        if components.lacks(kind, part):
            return f"a part of {named} is not installed"
    folders = [path / DRAFTER for path in runs_of(node, f"heads.{name}")]
    folders += saved_parts(node.get("drafter"), components)
    missing = [folder for folder in folders if not (folder / DESCRIPTION).exists()]
    return f"{missing[0]} holds no trained drafter" if missing else ""


def runs_of(node: Mapping[str, Any], key: str) -> list[Path]:
    """Return the folders of the runs whose drafters a head has.

    Args:
        node: of the head.
        key: where the node stands.

    Raises:
        ConfigError: they are no list of folders.
    """
    folders = node.get("runs", [])
    if not isinstance(folders, list) or not all(isinstance(each, str) for each in folders):
        raise ConfigError(
            join(key, "runs"), f"must be a list of folders, as in [runs/eagle], not {folders!r}"
        )
    return [Path(each) for each in folders]


@dataclass(frozen=True)
class _Loader:
    """Reads one head.

    Attributes:
        name: of the head.
        node: what the YAML says of it.
        base: the experiment of all heads, which is known to be right.
        tree: the same as a plain tree.
        components: the registry.
    """

    name: str
    node: Mapping[str, Any]
    base: Experiment
    tree: Mapping[str, Any]
    components: Components

    def head(self) -> Head:
        """Return the head with its experiments.

        Raises:
            ConfigError: with the key as it stands in the comparison's file.
        """
        key = f"heads.{self.name}"
        if not re.fullmatch(r"[\w.+=-]+", self.name):
            raise ConfigError(key, "names a folder; use letters, digits and _.+=-")
        for part in self.node:
            if part in vars(self.base) and part not in HEAD_KEYS:
                raise ConfigError(join(key, part), SHARED)
            if part not in HEAD_KEYS:
                hint = did_you_mean(part, HEAD_KEYS)
                raise ConfigError(join(key, part), f"unknown key{hint}")
        trains = self._flag("train", True)
        self._flag("optional", False)
        if "runs" in self.node:
            return self._of_runs()
        seeds = self.base.seeds or [self.base.seed]
        try:
            runs = {seed: self._experiment(seed) for seed in (seeds if trains else seeds[:1])}
        except ConfigError as error:  # the base was right, so it is the head's
            raise ConfigError(join(key, error.key), error.problem) from None
        folders = {seed: Path(run.out) / DRAFTER for seed, run in runs.items()}
        return Head(self.name, trains, runs, folders, spend=self._spend(trains, seeds[0]))

    def _of_runs(self) -> Head:
        """Return a head whose drafters are those of finished runs, which may decode otherwise.

        Raises:
            ConfigError: with the key, or a folder holds no finished run.
        """
        key = f"heads.{self.name}"
        allowed = ("runs", "optional", *DECODING_NODES)
        for part in self.node:
            if part not in allowed:
                known = ", ".join(allowed)
                raise ConfigError(
                    join(key, part), f"its drafters are trained; beside runs it may have {known}"
                )
        folders = runs_of(self.node, key)
        if not folders:
            raise ConfigError(join(key, "runs"), "is empty; name the folder of a finished run")
        own = plain_overrides({k: v for k, v in self.node.items() if k in DECODING_NODES}, key)
        try:
            runs = [_finished_run(folder, self.components, own) for folder in folders]
        except ConfigError as error:
            raise ConfigError(join(key, error.key), error.problem) from None
        except FalconLabError as error:
            raise ConfigError(join(key, "runs"), str(error)) from None
        head = Head(self.name, True, {}, {}, given=True)
        for folder, run in zip(folders, runs, strict=True):
            _add_run(head, folder, run)
        return head

    def _spend(self, trains: bool, seed: int) -> dict[str, Experiment]:
        """Budget -> the experiment with what differs there."""
        key, node = f"heads.{self.name}.spend", self.node.get("spend", {})
        if not isinstance(node, Mapping):
            raise ConfigError(key, "must be a mapping of budgets to what differs there")
        found = {}
        for word, changes in node.items():
            here = join(key, word)
            if parse_budget(str(word), here).nodes is None:
                raise ConfigError(here, "is no number of nodes; name a chain-D or a tree-N")
            allowed = DECODING_NODES if trains else ("drafter", *DECODING_NODES)
            if not isinstance(changes, Mapping):
                raise ConfigError(
                    here, f"must be a mapping, as in {{tree: {{depth: 3}}}}, not {changes!r}"
                )
            for part in changes:
                if part not in allowed:
                    raise ConfigError(join(here, part), f"unknown key{did_you_mean(part, allowed)}")
            try:
                found[word] = self._experiment(seed, changes)
            except ConfigError as error:
                raise ConfigError(join(here, error.key), error.problem) from None
        return found

    def _flag(self, name: str, default: bool) -> bool:
        value = self.node.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"heads.{self.name}.{name}", f"is {value!r}; write true or false")
        return value

    def _experiment(self, seed: int, changes: Mapping[str, Any] | None = None) -> Experiment:
        """The experiment of a seed, with what else differs at a budget."""
        tree = deepcopy(dict(self.tree))
        own = {key: value for key, value in self.node.items() if key in HEAD_NODES}
        for layer in (own, changes or {}):
            overrides = [Override(key, deepcopy(value), "") for key, value in layer.items()]
            apply_overrides(tree, overrides, DEFAULT_NAMES)
        tree |= {"seed": seed, "seeds": [], "stages": list(TRAINING)}
        experiment = experiment_of(tree, self.components)
        experiment.out = f"{self.base.out}/{self.name}-seed{seed}"
        experiment.wandb.group = experiment.wandb.group or self.base.name
        experiment.name = f"{self.base.name}-{self.name}-seed{seed}"
        return experiment


def plan_of_runs(
    folders: Sequence[Path], overrides: Sequence[str] = (), *, components: Components | None = None
) -> Plan:
    """The comparison of runs that are there. The first one says how to measure.

    Args:
        folders: of runs; ``NAME-seed0``, ``NAME-seed1``, … are one head.
        overrides: of the first run's experiment, and ``budgets``, ``temperatures``, ``tuning``.
        components: the registry; None loads what is installed.

    Raises:
        FalconLabError: a folder holds no finished run, two are of one head and seed, or an
            override is wrong.
    """
    components = components or load_components()
    of_comparison = parse_overrides(text for text in overrides if _of_comparison(text))
    others = [text for text in overrides if not _of_comparison(text)]
    runs = [_finished_run(folder, components) for folder in folders]
    names = "-".join(dict.fromkeys(_head_name(folder) for folder in folders))
    fixed = {"stages": ["evaluate"], "seeds": [], "name": "compare", "out": f"runs/compare-{names}"}
    known = plain_overrides(fixed, str(folders[0]))
    base = run_experiment(folders[0], [*known, *others], components=components)
    tree = {"budgets": list(BUDGETS)}
    try:
        apply_overrides(tree, of_comparison, DEFAULT_NAMES)
        config = resolve(ComparisonConfig, tree)
        return finished_plan(base, config, _heads_of_runs(folders, runs))
    except ConfigError as error:
        raise error.at(Origin("the command line", of_comparison).blame(error)) from None


def _of_comparison(override: str) -> bool:
    return override.lstrip("-+").partition("=")[0].partition(".")[0] in COMPARISON_KEYS


def _finished_run(
    folder: Path, components: Components, overrides: Sequence[Override] = ()
) -> Experiment:
    path = folder / CONFIGURATION
    if not path.exists():
        raise FalconLabError(
            f"{folder}: no run's folder ({CONFIGURATION} is missing); name runs, or a YAML with "
            "heads"
        )
    if not (folder / DRAFTER / DESCRIPTION).exists():
        raise FalconLabError(f"{folder}: its drafter is not trained yet; finish that run first")
    return run_experiment(folder, ["seeds=[]", *overrides], components=components)


def _head_name(folder: Path) -> str:
    return re.sub(r"-seed\d+$", "", folder.absolute().name)


def _heads_of_runs(folders: Sequence[Path], runs: Sequence[Experiment]) -> list[Head]:
    heads: dict[str, Head] = {}
    for folder, run in zip(folders, runs, strict=True):
        name = _head_name(folder)
        if problem := HEAD_NAME.refusal(name):
            raise FalconLabError(f"{folder}: heads are called as their folders, and this {problem}")
        _add_run(heads.setdefault(name, Head(name, True, {}, {}, given=True)), folder, run)
    return list(heads.values())


def _add_run(head: Head, folder: Path, run: Experiment) -> None:
    """Give a head the drafter of a finished run.

    Raises:
        FalconLabError: it has one of that seed.
    """
    if run.seed in head.experiments:
        raise FalconLabError(
            f"{folder} and {head.folders[run.seed].parent} are both {head.name} with seed "
            f"{run.seed}; give one of the folders another name"
        )
    head.experiments[run.seed] = run
    head.folders[run.seed] = folder / DRAFTER
