"""What ``generate`` and ``check`` decode with: an experiment without a YAML. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_lab.config import load_experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.schema import Experiment


def decoding_experiment(drafter: Path | None, overrides: Sequence[str]) -> Experiment:
    """Defaults, then what the drafter's folder says of its target, then the overrides.

    Raises:
        FalconLabError: there is no drafter in the folder, or an override is wrong.
    """
    known = [] if drafter is None else target_overrides(drafter)
    return load_experiment(None, [*known, *overrides])


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
