"""A run: its folder, what is in it, and what its stages hand to each other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.load import dump, to_plain
from falcon_lab.config.saved import (
    ANSWERS,
    CHECKPOINTS,
    CONFIGURATION,
    DESCRIPTION,
    DRAFTER,
    FACTS,
    HISTORY,
    REPORT,
    RESULTS,
    read_facts,
    run_experiment,
)
from falcon_lab.config.schema import Experiment
from falcon_lab.environment import is_worker, wandb_mode, wandb_run, world_size
from falcon_lab.errors import FalconLabError
from falcon_lab.files import (
    check_place,
    locked,
    make_folder,
    remove_leftovers,
    write_atomically,
)
from falcon_lab.folders import finish_exchange
from falcon_lab.measure.journal import FOLDER as ROWS
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from falcon_lab.stored import read_bounded

if TYPE_CHECKING:
    from falcon_lab.data.datamodule import FalconDataModule
    from falcon_lab.model.target import Target
    from falcon_lab.pretraining.target import TargetAhead
    from falcon_lab.report.tracking import Tracking

DECIDES_THE_DRAFTER = (
    "seed",
    "target",
    "data",
    "drafter",
    "glancing",
    "objective",
    "distillation",
    "trainer",
)
"""Sections of the configuration that a trained drafter depends on."""

HARMLESS = (
    "trainer.enable_",
    "trainer.log_every",
    "distillation.decode_",
    "distillation.logits_mib",
    "distillation.compile",
    "distillation.save_dtype",
    "target.device",
    "data.feature_store_taps",
    "data.server",
    "data.extracted_states",
    "target.tune.checkpoint_every",
    "target.tune.choices",
)
"""Keys in them that it does not depend on, but for rounding."""


@dataclass
class Run:
    """Hold what the stages of one experiment share.

    Attributes:
        experiment: the validated configuration.
        folder: where every product is kept.
        announce: is called with one line for the user.
        target: the frozen model, once its stage has loaded it.
        data: once their stage has packed them.
        quality: what is known of a target that was trained here.
        ahead: the target as it was before anything was trained.
    """

    experiment: Experiment
    folder: Path
    announce: Callable[[str], None]
    target: Target = field(init=False)
    data: FalconDataModule = field(init=False)
    quality: dict[str, Any] | None = None
    ahead: TargetAhead | None = None

    @classmethod
    def at(cls, experiment: Experiment, *, announce: Callable[[str], None]) -> Run:
        """Return the run of an experiment without touching its folder."""
        wandb_mode(experiment.wandb.mode)  # is refused now, where the environment has a wrong one
        return cls(experiment, run_folder(experiment), announce)

    @classmethod
    @contextmanager
    def open(cls, experiment: Experiment, *, announce: Callable[[str], None]) -> Iterator[Run]:
        """Take hold of the run's folder.

        Raises:
            FalconLabError: another run is using the folder, or it holds a drafter that another
                configuration trained.
        """
        current = cls.at(experiment, announce=announce)
        make_folder(current.folder)
        if current.is_worker:  # of a distributed training, whose first process holds the lock
            yield current
            return
        busy = (
            f"{current.folder}: another run is using this folder; wait for it or choose another "
            "with out=FOLDER"
        )
        with locked(current.folder / ".lock", busy=busy):
            inside = (current.folder / name for name in (ANSWERS, ROWS))
            remove_leftovers(current.folder, current.drafter_folder, *inside)
            current.claim()
            finished = False
            try:
                yield current
                finished = True
            finally:
                if "tracking" in current.__dict__:
                    current.tracking.finish(failed=not finished)

    @property
    def is_worker(self) -> bool:
        """Return whether this process only takes part in a distributed training."""
        return is_worker()

    @cached_property
    def components(self) -> Components:
        """Load the registry of components."""
        return load_components()

    @cached_property
    def tracking(self) -> Tracking:
        """Start the loggers, when the first stage needs them."""
        from falcon_lab.report.tracking import start_tracking

        trains = "distil" in self.experiment.stages
        return start_tracking(
            self.folder,
            self.experiment.wandb,
            to_plain(self.experiment),
            job_type="train" if trains else "bench",
        )

    @property
    def results_path(self) -> Path:
        """Return the file of everything that was measured."""
        return self.folder / RESULTS

    def load_results(self) -> dict[str, Any]:
        """Read ``results.json`` of this folder.

        Raises:
            FalconLabError: there is none yet, or it cannot be read.
        """
        from falcon_lab.measure.results import load_results

        if not self.results_path.exists():
            raise FalconLabError(
                f"{self.results_path}: nothing to report yet; run the stage evaluate first"
            )
        return load_results(self.results_path)

    @property
    def drafter_folder(self) -> Path:
        """Return the folder of the saved drafter."""
        return self.folder / DRAFTER

    @property
    def checkpoint_folder(self) -> Path:
        """Return the folder of Lightning's checkpoints."""
        return self.folder / CHECKPOINTS

    @property
    def training_done(self) -> bool:
        """Return whether the drafter of this configuration is finished."""
        return (self.drafter_folder / DESCRIPTION).exists()

    def check_claim(self) -> None:
        """See that this run may have the folder, which is not touched.

        Raises:
            FalconLabError: what was trained here had other settings, nothing says which, or a file
                of somebody else's would be replaced.
        """
        for name, folder in PRODUCTS.items():
            check_place(self.folder / name, folder=folder)
        if self.training_done or any(self.checkpoint_folder.glob("*.ckpt")):
            refuse_changes(self.facts_before(), self.facts, self.folder)
        elif "distil" in self.experiment.stages and not (self.folder / FACTS).exists():
            self.refuse_to_replace_a_configuration()

    def claim(self) -> None:
        """Write the configuration down, or see that it is the one written down before.

        Raises:
            FalconLabError: as ``check_claim``.
        """
        trains = "distil" in self.experiment.stages
        if trains:
            finish_exchange(self.drafter_folder)
        self.check_claim()
        write_atomically(self.folder / FACTS, json.dumps(self.facts, indent=2, sort_keys=True))
        if trains:
            write_atomically(self.folder / CONFIGURATION, dump(self.experiment))

    @property
    def facts(self) -> dict[str, Any]:
        """Return what decides the drafter of this run."""
        return training_facts(self.experiment)

    def facts_before(self) -> dict[str, Any]:
        """Return what decided the drafter, or the checkpoints, that are there.

        Raises:
            FalconLabError: nothing says it, or what does is damaged.
        """
        if (self.folder / FACTS).exists():
            return read_facts(self.folder / FACTS)
        if (self.folder / CONFIGURATION).exists():
            return training_facts(run_experiment(self.folder, [], components=self.components))
        raise FalconLabError(
            f"{self.folder}: holds a drafter or checkpoints, and neither {FACTS} nor "
            f"{CONFIGURATION}, which say what they were trained with; choose another folder with "
            "out=FOLDER (falcon-lab evaluate measures the drafter of a folder as it is)"
        )

    def refuse_to_replace_a_configuration(self) -> None:
        """Raise when the folder's experiment is not one that a run wrote there."""
        path = self.folder / CONFIGURATION
        if path.exists() and read_bounded(path).decode(errors="replace") != dump(self.experiment):
            raise FalconLabError(
                f"{path}: would be replaced by the resolved experiment, and no run wrote it (there "
                f"is no {FACTS} beside it); choose another folder with out=FOLDER"
            )


PRODUCTS = {
    FACTS: False,
    CONFIGURATION: False,
    HISTORY: False,
    RESULTS: False,
    REPORT: False,
    CHECKPOINTS: True,
    DRAFTER: True,
    ANSWERS: True,
}
"""What a run writes into its folder -> whether that is a folder."""


def run_folder(experiment: Experiment, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the experiment's ``out``; each run of a sweep adds its W&B id."""
    run = wandb_run(environment)
    if environment.get("WANDB_SWEEP_ID") and run:
        return Path(f"{experiment.out}-{run}")
    return Path(experiment.out)


def training_facts(experiment: Experiment) -> dict[str, Any]:
    """Return the dotted keys that decide what drafter comes out, with their values."""
    plain = to_plain(experiment)
    facts = {
        key: value
        for section in DECIDES_THE_DRAFTER
        for key, value in flatten(plain[section], section)
    }
    return {k: v for k, v in facts.items() if not k.startswith(HARMLESS)}


def flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield nested mappings as dotted keys; an empty one has none."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}")
    else:
        yield prefix, value


def refuse_changes(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise when the folder's drafter was trained with other settings.

    A key that an older version did not write down had what is its default today.
    """
    defaults = training_facts(Experiment())
    before = before | {k: defaults[k] for k in now if k not in before and k in defaults}
    changed = [k for k in sorted({*before, *now}) if before.get(k) != now.get(k)]
    if changed:
        key = changed[0]
        more = f" (and {len(changed) - 1} more keys)" if len(changed) > 1 else ""
        raise FalconLabError(
            f"{folder}: its drafter was trained with {key}={before.get(key)!r}, not "
            f"{now.get(key)!r}{more}; choose another folder with out=FOLDER, or delete this one"
        )


def keep_to_one_device(experiment: Experiment) -> None:
    """Refuse several devices: a second training in one process cannot start its workers.

    They would begin with the first training, and a machine with several GPUs would wait for ever.

    Raises:
        FalconLabError: the trainer asks for several.
    """
    devices = experiment.trainer.setdefault("devices", 1)
    alone = len(devices) == 1 if isinstance(devices, list) else str(devices) == "1"
    if not alone or world_size() > 1:
        raise FalconLabError(
            f"trainer.devices is {devices}: heads and seeds are trained one after another on one "
            "device; to train on several, run each alone with seeds=[], then compare the runs"
        )
