"""An experiment from its configuration to its report: five stages, in this order.

1. target    the frozen language model, loaded or trained once
2. data      text or chats, packed into batches
3. distil    the drafter, trained on the target's features
4. evaluate  plain and speculative decoding, paired, on prompts
5. report    results.json, report.html, the drafter's card, W&B

Each stage leaves its product in the run folder, so that a killed run resumes where it stopped and
``stages=[evaluate]`` uses the drafter that is there.
"""

from __future__ import annotations

from collections.abc import Callable

from falcon_lab.config.schema import STAGES, Experiment
from falcon_lab.run import Run


def run(experiment: Experiment, *, announce: Callable[[str], None]) -> Run:
    """Run the stages that the experiment names.

    ``announce`` is called with one line for the user at a time.

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
    """Load the frozen target, and what is known of its quality. Every stage needs it."""
    from falcon_lab.pretraining.quality import gate_sentence
    from falcon_lab.pretraining.target import ensure_target, stored_quality

    config = current.experiment.target
    current.target = ensure_target(config, current.announce, current.components)
    current.quality = stored_quality(config, current.components)
    if wanted:
        size = sum(weight.numel() for weight in current.target.model.parameters()) / 1e6
        known = f"{size:.1f} M parameters, fingerprint {current.target.fingerprint}"
        judged = f"; {gate_sentence(current.quality)}" if current.quality else ""
        current.announce(f"target {current.target.name}: {known}{judged}")


def data(current: Run, *, wanted: bool) -> None:
    """Read and pack the training data; left out when only an evaluation is wanted."""
    from falcon_lab.data.datamodule import prepare_data

    experiment = current.experiment
    if (wanted or "distil" in experiment.stages) and not current.training_done:
        current.data = prepare_data(
            experiment.data,
            current.target,
            drafter=experiment.drafter,
            components=current.components,
            announce=current.announce,
        )


def distil(current: Run, *, wanted: bool) -> None:
    """Train the drafter and save it; the one that is there is kept."""
    from falcon_lab.distill.stage import train_drafter

    if wanted and current.training_done:
        current.announce(f"the drafter in {current.drafter_folder} is trained already")
    elif wanted:
        train_drafter(
            current.experiment,
            current.target,
            current.data,
            current.components,
            folder=current.folder,
            save_to=current.drafter_folder,
            loggers=current.tracking.loggers,
        )


def evaluate(current: Run, *, wanted: bool) -> None:
    """Measure every method, paired."""
    from falcon_lab.studies.evaluate import evaluate_methods

    if wanted:
        evaluate_methods(
            current.experiment,
            current.target,
            current.components,
            current.folder,
            trained=current.drafter_folder,
            quality=current.quality,
            announce=current.announce,
        )


def report(current: Run, *, wanted: bool) -> None:
    """Write everything that is shown and shared."""
    from falcon_lab.report.stage import write_everything

    if wanted:
        write_everything(
            current.experiment,
            current.load_results(),
            current.folder,
            drafter=current.drafter_folder if current.training_done else None,
            tracking=current.tracking,
            announce=current.announce,
        )


STAGE: dict[str, Callable[..., None]] = {
    "target": target,
    "data": data,
    "distil": distil,
    "evaluate": evaluate,
    "report": report,
}
