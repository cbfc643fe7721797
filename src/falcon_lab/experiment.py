"""An experiment from its configuration to its report: five stages, in this order.

1. target    the frozen language model, loaded or trained once
2. data      text or chats, packed into batches
3. distil    the drafter, trained on the target's features
4. evaluate  plain and speculative decoding, paired, on prompts
5. report    results.json, report.html, the drafter's card, W&B

Each stage leaves its product in the run folder, so that a killed run resumes where it stopped and
``stages=[evaluate]`` uses the drafter that is there.

Before the first of them, ``check`` goes through all: what the last stage would refuse is refused
before anything is trained, measured or written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from falcon_lab.config.schema import STAGES, Experiment
from falcon_lab.environment import is_worker
from falcon_lab.errors import FalconLabError
from falcon_lab.run import Run

if TYPE_CHECKING:
    from falcon_lab.pretraining.target import TargetAhead


def run(
    experiment: Experiment, *, announce: Callable[[str], None], ahead: TargetAhead | None = None
) -> Run:
    """Check the stages that the experiment names, and run them.

    Args:
        experiment: the configuration.
        announce: is called with one line for the user at a time.
        ahead: the target or its stand-in, where all was checked already.

    Raises:
        FalconLabError: for whatever the user can mend; what was finished stays finished.
    """
    if ahead is None and not is_worker():
        ahead = check(experiment, announce=announce)
    with Run.open(experiment, announce=announce) as current:
        current.ahead = ahead
        for name in STAGES:
            if name in experiment.stages and not current.is_worker:
                announce(f"— {name}")
            STAGE[name](current, wanted=name in experiment.stages)
            if current.is_worker and name == "distil":
                break  # the other processes of a distributed training have done their part
        return current


def check(
    experiment: Experiment, *, announce: Callable[[str], None], ahead: TargetAhead | None = None
) -> TargetAhead:
    """See that every stage can do its work, without doing it; nothing is written.

    The target is loaded where it is there; for one that is still to be trained, a stand-in of its
    shape is asked.

    Args:
        experiment: the configuration.
        announce: is called with one line for the user at a time.
        ahead: the target or its stand-in, where it is known.

    Raises:
        FalconLabError: what a stage would refuse.
    """
    from falcon_lab.pretraining.target import target_ahead

    current = Run.at(experiment, announce=announce)
    check_files(experiment)
    ahead = ahead or target_ahead(experiment.target, announce, current.components)
    wanted = {*experiment.stages, *(["data"] if "distil" in experiment.stages else [])}
    for name, check_stage in CHECK.items():
        if name in wanted:
            check_stage(current, ahead)
    return ahead


def check_files(experiment: Experiment) -> None:
    """See that files that are read are there and can be, and that the run may have its folder.

    It is the part of ``check`` that imports no torch.

    Raises:
        FalconLabError: naming the file or the key.
    """
    from falcon_lab.config.saved import opened_drafter, read_description
    from falcon_lab.data.documents import load_template
    from falcon_lab.measure.prompts import check_prompts
    from falcon_lab.pretraining.tuned import questions_of

    Run.at(experiment, announce=lambda line: None).check_claim()
    if experiment.target.tune is not None:
        questions_of(experiment.target)
    if "data" in experiment.stages or "distil" in experiment.stages:
        load_template(experiment.data.chat_template)
    if "evaluate" in experiment.stages:
        check_prompts(experiment.evaluation.prompts)
        for name, method in experiment.evaluation.methods.items():
            if method.drafter_path is not None and not method.optional:
                key = f"evaluation.methods.{name}.drafter_path"
                with named(key), opened_drafter(method.drafter_path) as folder:
                    read_description(folder)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Put a key before what is refused inside the block."""
    try:
        yield
    except FalconLabError as error:
        raise FalconLabError(f"{key}: {error}") from error


def target(current: Run, *, wanted: bool) -> None:
    """Load the frozen target, and what is known of its quality. Every stage needs it."""
    from falcon_lab.pretraining.quality import gate_sentence
    from falcon_lab.pretraining.target import ensure_target, stored_quality

    config = current.experiment.target
    if current.ahead is None:
        current.target = ensure_target(config, current.announce, current.components)
    else:
        current.target = current.ahead.itself(config, current.announce, current.components)
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


def check_data(current: Run, ahead: TargetAhead) -> None:
    """See that the data can be prepared."""
    from falcon_lab.data.datamodule import check_data

    experiment = current.experiment
    if not current.training_done:
        check_data(
            experiment.data,
            ahead.target,
            drafter=experiment.drafter,
            components=current.components,
            stands_in=ahead.stands_in,
        )


def distil(current: Run, *, wanted: bool) -> None:
    """Train the drafter and save it; the one that is there is kept."""
    from falcon_lab.distill.stage import train_drafter
    from falcon_lab.drafters.saved import save_as

    dtype = current.experiment.distillation.save_dtype
    if wanted and current.training_done:
        current.announce(f"the drafter in {current.drafter_folder} is trained already")
        if not current.is_worker and save_as(current.drafter_folder, dtype):
            current.announce(f"it is saved in {dtype} now")
    elif wanted:
        train_drafter(
            current.experiment,
            current.target,
            current.data,
            current.components,
            folder=current.folder,
            save_to=current.drafter_folder,
            loggers=current.tracking.loggers,
            announce=current.announce,
        )


def check_distil(current: Run, ahead: TargetAhead) -> None:
    """See that the drafter can be trained, and its curves be recorded."""
    from falcon_lab.distill.stage import check_training
    from falcon_lab.report.tracking import check_tracking

    if not current.training_done:
        check_tracking(current.experiment.wandb)
        check_training(
            current.experiment,
            ahead.target,
            current.components,
            current.folder,
            stands_in=ahead.stands_in,
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


def check_evaluate(current: Run, ahead: TargetAhead) -> None:
    """See that every method can be measured; a fresh drafter stands in for one to be trained."""
    from falcon_lab.measure.engines import Setup

    fresh = "distil" in current.experiment.stages and not current.training_done
    setup = Setup.ahead(current.experiment, ahead, current.components)
    setup.check(None if fresh else current.drafter_folder)


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


def check_report(current: Run, ahead: TargetAhead) -> None:
    """See that there will be something to report, and that it can be sent where it is to go."""
    from falcon_lab.report.tracking import check_tracking

    check_tracking(current.experiment.wandb)
    if "evaluate" not in current.experiment.stages:
        current.load_results()


STAGE: dict[str, Callable[..., None]] = {
    "target": target,
    "data": data,
    "distil": distil,
    "evaluate": evaluate,
    "report": report,
}

CHECK: dict[str, Callable[[Run, TargetAhead], None]] = {
    "data": check_data,
    "distil": check_distil,
    "evaluate": check_evaluate,
    "report": check_report,
}
"""Stage -> the check of what it needs, in the order of ``STAGES``; the target's is its loading."""
