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

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from falcon_lab.config.load import load_experiment
from falcon_lab.config.schema import STAGES, Experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.run import CONFIGURATION, Run


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
    from falcon_lab.pretraining.target import ensure_target, stored_quality

    config = current.experiment.target
    current.target = ensure_target(config, current.announce)
    current.quality = stored_quality(config)
    if wanted:
        current.announce(f"target {current.target.name}: {current.describe_target()}")


def data(current: Run, *, wanted: bool) -> None:
    """The training data; left out when only an evaluation is wanted."""
    from falcon_lab.data.stage import prepare_data

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
    """The drafter: trained, or the one that is there."""
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
    """The paired measurement of every method."""
    from falcon_lab.studies.evaluate import evaluate_methods

    if wanted:
        evaluate_methods(current)


def report(current: Run, *, wanted: bool) -> None:
    """Everything that is shown and shared."""
    from falcon_lab.report.stage import write_everything

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
) -> None:
    """Run every (variant, seed) in a folder of its own, then put them side by side.

    Raises:
        FalconLabError: the trainer asks for several devices.
    """
    for _, _, experiment in experiments:
        keep_to_one_device(experiment)
    done = []
    for name, seed, experiment in experiments:
        announce(f"== {name}, seed {seed}")
        finished = run(experiment, announce=announce)
        done.append((name, seed, finished.folder))
    from falcon_lab.studies.variants import tabulate

    announce(tabulate(done, done[0][2].parent))


def keep_to_one_device(experiment: Experiment) -> None:
    """A second training in one process cannot start its workers: they would begin with the first.

    Without this, a machine with several GPUs would wait for them for ever.

    Raises:
        FalconLabError: the trainer asks for several.
    """
    devices = experiment.trainer.setdefault("devices", 1)
    alone = len(devices) == 1 if isinstance(devices, list) else str(devices) == "1"
    if not alone or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise FalconLabError(
            f"trainer.devices is {devices}: variants and seeds are trained one after another on "
            "one device; give one variant at a time several: variants={} seeds=[] seed=0"
        )


def evaluate_saved(
    folder: Path, overrides: Sequence[str], *, announce: Callable[[str], None]
) -> Run:
    """Measure the drafter of a run's folder, or a saved drafter's folder by itself.

    Raises:
        FalconLabError: the folder holds neither.
    """
    return run(saved_experiment(folder, overrides), announce=announce)


def use_drafter_of(run_folder: Path, experiment: Experiment) -> None:
    """Let the methods that rely on the run's own drafter find it from another folder."""
    for method in experiment.evaluation.methods.values():
        if method.drafter is None and method.drafter_path is None:
            method.drafter_path = str(run_folder / "drafter")


def saved_experiment(folder: Path, overrides: Sequence[str]) -> Experiment:
    """The experiment that evaluates what is in ``folder``.

    A run's folder is measured as its own experiment says. A drafter's folder that was shared is
    measured by its chain and its default tree, into ``runs/evaluate-NAME``.
    """
    from falcon_lab.commands.settings import target_overrides

    stages = "stages=[evaluate, report]"
    for run_folder in (folder, folder.parent):
        if (run_folder / CONFIGURATION).exists():
            fixed = [stages, f"out={json.dumps(str(run_folder))}", "variants={}", "seeds=[]"]
            experiment = load_experiment(run_folder / CONFIGURATION, [*fixed, *overrides])
            if Path(experiment.out) != run_folder:
                use_drafter_of(run_folder, experiment)
            return experiment
    path = json.dumps(str(folder))
    rows = [
        f"evaluation.methods.chain.drafter_path={path}",
        "evaluation.methods.chain.tree.name=chain",
        f"evaluation.methods.tree.drafter_path={path}",
        "evaluation.methods.tree.tree.name=static",
    ]
    name = f"evaluate-{folder.resolve().name}"
    known = [f"name={json.dumps(name)}", stages, *target_overrides(folder), *rows]
    return load_experiment(None, [*known, *overrides])
