"""A target trained from scratch on this machine's Python sources, its drafter, and what it brings.

Three steps, each of which leaves its product in a folder, so that each fits into a short call:
the target, the drafter (by CSGD; both in ``gpu_training.py``), and the measurement on prompts that
neither was trained on.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from falcon_bench.gpu_training import (
    CORPUS,
    DRAFTER,
    LOSS,
    TARGET,
    Announce,
    Plan,
    make_target,
    train_plan,
)
from falcon_lab.config.saved import bench_experiment
from falcon_lab.config.schema import PLAIN
from falcon_lab.studies.bench import HF, HF_LOOKUP
from falcon_lab.studies.bench.decoding import bench_decoding


def bench_real(plan: Plan, folder: Path, until: str, announce: Announce) -> dict[str, Any] | None:
    """Continue from what the folder has.

    Args:
        plan: what, and for how long.
        folder: where products are kept.
        until: ``target``, ``drafter`` or ``measure``.
        announce: is called with one line for the user at a time.

    Returns:
        After ``measure``: ``plan``, ``target`` (parameters, steps, seconds, held-out loss),
        ``drafter`` (steps, seconds), and under ``measured`` what ``bench_decoding`` says at each
        temperature; else None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_target(plan, folder, announce)
    if until == "target":
        return None
    train_plan(plan, folder, announce)
    if until == "drafter":
        return None
    return {
        "plan": asdict(plan),
        "target": facts(folder / TARGET / LOSS),
        "drafter": facts(folder / "drafter.json"),
        "measured": {f"T={t:g}": measured(plan, folder, t, announce) for t in plan.temperatures},
    }


def measured(plan: Plan, folder: Path, temperature: float, announce: Announce) -> dict[str, Any]:
    """Every tree beside plain decoding and Hugging Face's ways, without the answers."""
    settings = {
        "target.name": str(folder / TARGET),
        "target.dtype": plan.dtype,
        "target.lean": True,
        "target.attention": "auto" if torch.cuda.is_available() else "sdpa",
        "decoding.compile": plan.compile,
        "evaluation.temperature": temperature,
        "evaluation.max_new_tokens": plan.new_tokens,
        "evaluation.repeats": 1,
        "evaluation.prompts.name": prompts_of(plan, announce),
        "evaluation.prompts.limit": plan.limit,
        "evaluation.warmup": plan.limit,
        "data.corpus": str(folder / CORPUS),
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    experiment = bench_experiment(folder / DRAFTER / "drafter", plan.trees, overrides)
    methods = [HF, PLAIN, "drafter", *([HF_LOOKUP] if plan.lookup else [])]
    results = bench_decoding(experiment, methods, announce=announce)
    for row in results["rows"]:
        for turn in row["turns"]:
            turn.pop("tokens", None)
            turn.pop("text", None)
    return results


def prompts_of(plan: Plan, announce: Announce) -> str:
    """The plan's prompts, or held-out sources where that file is not there."""
    if Path(plan.prompts).is_file():
        return plan.prompts
    announce(f"there is no {plan.prompts}: prompts are the beginnings of held-out sources")
    return "heldout"


def facts(path: Path) -> dict[str, Any]:
    """Read what a step has written."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
