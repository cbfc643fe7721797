"""A comparison without a YAML: run folders whose drafters are measured side by side.

Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from falcon_lab.config.load import DEFAULT_NAMES, load_experiment
from falcon_lab.config.overrides import Origin, apply_overrides, parse_overrides
from falcon_lab.config.saved import CONFIGURATION
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.fields import resolve
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.studies.compare.config import COMPARISON_KEYS, ComparisonConfig
from falcon_lab.studies.compare.loading import finished_plan
from falcon_lab.studies.compare.plan import Head, Plan

BUDGETS = ["chain-4", "tree-16", "own"]
"""What runs are compared with where nothing else is said."""


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
    runs = [_run(folder, components) for folder in folders]
    names = "-".join(dict.fromkeys(_name(folder) for folder in folders))
    fixed = [
        "stages=[evaluate]",
        "seeds=[]",
        "name=compare",
        f"out={json.dumps(f'runs/compare-{names}')}",
    ]
    base = load_experiment(folders[0] / CONFIGURATION, [*fixed, *others], components=components)
    tree = {"budgets": list(BUDGETS)}
    try:
        apply_overrides(tree, of_comparison, DEFAULT_NAMES)
        config = resolve(ComparisonConfig, tree)
        return finished_plan(base, config, _heads(folders, runs), given=True)
    except ConfigError as error:
        raise error.at(Origin("the command line", of_comparison).blame(error)) from None


def _of_comparison(override: str) -> bool:
    return override.lstrip("-+").partition("=")[0].partition(".")[0] in COMPARISON_KEYS


def _run(folder: Path, components: Components) -> Experiment:
    path = folder / CONFIGURATION
    if not path.exists():
        raise FalconLabError(
            f"{folder}: no run's folder ({CONFIGURATION} is missing); name runs, or a YAML with "
            "heads"
        )
    if not (folder / "drafter" / "config.json").exists():
        raise FalconLabError(f"{folder}: its drafter is not trained yet; finish that run first")
    return load_experiment(path, ["seeds=[]"], components=components)


def _name(folder: Path) -> str:
    return re.sub(r"-seed\d+$", "", folder.absolute().name)


def _heads(folders: Sequence[Path], runs: Sequence[Experiment]) -> list[Head]:
    heads: dict[str, Head] = {}
    for folder, run in zip(folders, runs, strict=True):
        name = _name(folder)
        head = heads.setdefault(name, Head(name, True, {}, {}))
        if run.seed in head.experiments:
            raise FalconLabError(
                f"{folder} and {head.folders[run.seed].parent} are both {name} with seed "
                f"{run.seed}; give one of the folders another name"
            )
        head.experiments[run.seed] = run
        head.folders[run.seed] = folder / "drafter"
    return list(heads.values())
