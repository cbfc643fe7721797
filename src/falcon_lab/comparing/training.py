"""The trainings of a comparison: each an ordinary run, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from falcon_lab import experiment
from falcon_lab.comparing.plan import Head, Plan
from falcon_lab.reporting.curves import read_history
from falcon_lab.reporting.tracking import HISTORY
from falcon_lab.run import Run
from falcon_lab.schema import Experiment

PART = "train/time/"


def train_heads(plan: Plan, announce: Callable[[str], None]) -> None:
    """Train every head with every seed, as far as that has not been done.

    Raises:
        FalconLabError: a folder holds a drafter of other settings, or a training went astray.
    """
    pending = len(plan.pending)
    for head in (head for head in plan.heads if not head.drafters_of):
        for seed, run in head.experiments.items() if head.trains else ():
            experiment.keep_to_one_device(run)
            if head.trained(seed):
                with Run.open(run, announce=announce):
                    continue  # its settings are those of the folder
            announce(f"== {head.name}, seed {seed} ({pending} to train)")
            pending -= 1
            experiment.run(run, announce=announce)


def training_facts(head: Head, seed: int) -> dict[str, Any]:
    """What a training took: steps, tokens read, and seconds, as far as they are known.

    Seconds are the mean of the steps whose time was logged, times the steps: what the machine does
    between steps (validation, checkpoints) is not the head's.
    """
    from falcon_lab.distillation.stage import training_steps

    run = head.experiments[seed]
    steps = training_steps(run.trainer)
    folder = head.folders[seed].parent
    logged = [
        sum(value for key, value in record.items() if key.startswith(PART))
        for record in read_history(folder / HISTORY)
        if any(key.startswith(PART) for key in record)
    ]
    return {
        "seed": seed,
        "folder": str(folder),
        "steps": steps,
        "tokens": steps * tokens_a_step(run),
        "seconds": steps * sum(logged) / len(logged) if logged else None,
    }


def tokens_a_step(run: Experiment) -> int:
    """Tokens of the target's passes for one optimiser step."""
    batches = int(run.trainer.get("accumulate_grad_batches", 1) or 1)
    return run.data.batch_size * run.data.length * batches
