"""An experiment from its configuration to its report: five stages, in this order.

1. target    the frozen language model, loaded or trained once
2. data      text or chats, packed into batches
3. distil    the drafter, trained on the target's features
4. evaluate  plain and speculative decoding, paired, on prompts
5. report    results.json, report.html, the drafter's card, W&B

Each stage leaves its product in the run folder, so that a killed run goes on where it stopped and
``stages=[evaluate]`` uses the drafter that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from falcon_lab.run import Run
from falcon_lab.schema import STAGES, Experiment


def run(experiment: Experiment, *, announce: Callable[[str], None]) -> Run:
    """Run the stages that the experiment names.

    ``announce`` takes one line for the user at a time.

    Raises:
        FalconLabError: for whatever the user can mend; what was finished stays finished.
    """
    with Run.open(experiment, announce=announce) as current:
        for name in STAGES:
            if name in experiment.stages and not current.is_worker:
                announce(f"— {name}")
            STAGE[name](current, wanted=name in experiment.stages)
            if current.is_worker and name == "distil":
                break  # the other processes of a distributed training have done their part
        return current


def target(current: Run, *, wanted: bool) -> None:
    """The frozen target, with what is known of its quality. Every stage needs it."""
    from falcon_lab.targets.builtin import ensure_target, stored_quality

    config = current.experiment.target
    current.target = ensure_target(config, current.announce)
    current.quality = stored_quality(config)
    if wanted:
        current.announce(f"target {current.target.name}: {current.describe_target()}")


def data(current: Run, *, wanted: bool) -> None:
    """The training data; left out when only an evaluation is wanted."""
    from falcon_lab.distillation.stage import prepare_data

    if wanted or "distil" in current.experiment.stages:
        current.data = prepare_data(current)


def distil(current: Run, *, wanted: bool) -> None:
    """The drafter: trained, or the one that is there."""
    from falcon_lab.distillation.stage import train_drafter

    if wanted:
        train_drafter(current)


def evaluate(current: Run, *, wanted: bool) -> None:
    """The paired measurement of every method."""
    from falcon_lab.evaluation.stage import evaluate_methods

    if wanted:
        current.results = evaluate_methods(current)


def report(current: Run, *, wanted: bool) -> None:
    """Everything that is shown and shared."""
    from falcon_lab.reporting.stage import write_everything

    if wanted:
        write_everything(current)


STAGE: dict[str, Callable[..., None]] = {
    "target": target,
    "data": data,
    "distil": distil,
    "evaluate": evaluate,
    "report": report,
}


def run_variants(
    experiments: list[tuple[str, int, Experiment]], *, announce: Callable[[str], None]
) -> list[Path]:
    """Run every (variant, seed) in a folder of its own; the folders, in that order."""
    folders = []
    for name, seed, experiment in experiments:
        announce(f"== {name}, seed {seed}")
        folders.append(run(experiment, announce=announce).folder)
    return folders
