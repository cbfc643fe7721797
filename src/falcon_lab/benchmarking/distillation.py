"""Training measured against the same step written straightforwardly.

All loops take the same batches in turns, in one process, and start from the same weights. Ours runs
under Lightning as it always does; the others are looked after by a callback between its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from falcon_lab.benchmarking.distillation_cost import StepCost
from falcon_lab.benchmarking.machine import Machine, measure_machine
from falcon_lab.benchmarking.straightforward import CLIP, Manner, StraightforwardLoop
from falcon_lab.components import Components
from falcon_lab.config import to_plain
from falcon_lab.data.batch import Batch
from falcon_lab.data.datamodule import FalconDataModule
from falcon_lab.distillation.module import Distillation
from falcon_lab.distillation.training import train
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins import load_components
from falcon_lab.protocols import BuildContext
from falcon_lab.reporting import provenance
from falcon_lab.schema import Experiment
from falcon_lab.targets.builtin import ensure_target
from falcon_lab.targets.target import Target

OURS = "ours"
LADDER = {
    "straightforward, one document a row": Manner(alone=True, teach_each=True),
    "straightforward": Manner(padded=True, teach_each=True),
    "+ documents in lanes": Manner(teach_each=True),
    "+ one teacher pass for all phases": Manner(),
}
"""From the straightforward way to ours, one difference a row. What is left between the last of them
and ours: logits of the rows that count alone, once, a part at a time, with one softmax for both
terms; the noise drawn and the labels found once; accuracy in logged steps alone."""

WARM_UP = 3
"""First steps that do not count."""


class InTurns(Callback):
    """Between two steps of ours, every other loop takes one with the same batch.

    Attributes:
        seconds: loop -> of each step; ours with its data and its logging.
        cpu: the processor's time for the same, all threads together, which a busy machine disturbs
            less.
        losses: loop -> of each step.
        parts: of ours, part of a step -> of each step.
        batches: that were taken.
    """

    def __init__(self, loops: dict[str, StraightforwardLoop]) -> None:
        self.loops = loops
        self.seconds: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.cpu: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.losses: dict[str, list[float]] = {name: [] for name in (*loops, OURS)}
        self.parts: dict[str, list[float]] = {}
        self.batches: list[Batch] = []
        self._since = (0.0, 0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Our clock starts."""
        self._since = _now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop our clock, let the others have their turn, and start it again."""
        assert isinstance(pl_module, Distillation)
        self._note(OURS, self._since, float(outputs["loss"]))
        self.batches.append(batch)
        for part, taken in pl_module.clock.seconds.items():
            self.parts.setdefault(part, []).append(taken)
        for name, loop in self.loops.items():
            started = _now()
            self._note(name, started, loop.step(batch))
        self._since = _now()

    def _note(self, name: str, started: tuple[float, float], loss: float) -> None:
        wall, cpu = _now()
        self.seconds[name].append(wall - started[0])
        self.cpu[name].append(cpu - started[1])
        self.losses[name].append(loss)


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


def bench_distillation(
    experiment: Experiment, *, steps: int, announce: Callable[[str], None]
) -> dict[str, Any]:
    """Speed and curve of ours and of every rung of ``LADDER``.

    Args:
        experiment: target, data, drafter, glancing, objective, distillation, trainer.
        steps: that count.
        announce: takes one line for the user at a time.

    Returns:
        ``loops`` (by name: median seconds of a step, wall and CPU; tokens studied in a second; how
        many times as fast ours is; model FLOPs utilisation; losses, and their greatest relative
        difference from ours), ``parts`` (median seconds of ours), ``cost``, ``machine`` and where
        they come from.

    Raises:
        FalconLabError: the drafter or the objective is not Falcon's, or it has dropout.
    """
    target = ensure_target(experiment.target, announce)
    data = FalconDataModule.for_target(experiment.data, target)
    hardware = provenance.hardware(device=str(target.device), dtype=str(target.dtype))
    announce("measuring what this machine multiplies")
    machines = [measure_machine(target.device, target.dtype, 0)]
    module = module_of(experiment, target, load_components(), steps)
    turns = run_in_turns(module, data, steps, announce)
    machines.append(measure_machine(target.device, target.dtype, 0))
    machine = max(machines, key=lambda each: each.operations_per_second)  # the less disturbed one
    return {
        "schema": 1,
        "name": "distillation",
        "command": provenance.command_line(),
        "experiment": to_plain(experiment),
        "versions": provenance.versions(),
        "git": provenance.git_state(Path(__file__).parent),
        "hardware": hardware,
        "machine": asdict(machine),
        **summarise(module, turns, machine),
    }


def module_of(
    experiment: Experiment, target: Target, components: Components, steps: int
) -> Distillation:
    """The experiment's training, with fresh weights."""
    names = {kind: getattr(experiment, kind)["name"] for kind in ("drafter", "objective")}
    if set(names.values()) != {"falcon"} or experiment.drafter.get("dropout"):
        raise FalconLabError(
            f"this benchmark compares trainings of the falcon drafter by the falcon objective "
            f"without dropout, not of {names}; set drafter.name, objective.name and drafter.dropout"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        drafter = components.build("drafter", experiment.drafter, BuildContext(host=target))
    context = BuildContext.of(target, drafter)
    return Distillation(
        target,
        drafter.train(),
        components.build("objective", experiment.objective, context),
        components.build("schedule", experiment.glancing, context),
        experiment.distillation,
        seed=experiment.seed,
        max_steps=WARM_UP + steps,
    )


def run_in_turns(
    module: Distillation,
    data: FalconDataModule,
    steps: int,
    announce: Callable[[str], None],
) -> InTurns:
    """Train ours, with the others between its steps."""
    turns = InTurns({name: StraightforwardLoop(module, manner) for name, manner in LADDER.items()})
    announce(f"{WARM_UP + steps} steps of {len(LADDER) + 1} loops in turns")
    quiet = {"enable_progress_bar": False, "accelerator": module.target.device.type}
    trainer = {**quiet, "max_steps": WARM_UP + steps, "gradient_clip_val": CLIP}
    with TemporaryDirectory() as folder:
        train(module, data, trainer, Path(folder), None, 0, [turns])
    return turns


def summarise(module: Distillation, turns: InTurns, machine: Machine) -> dict[str, Any]:
    """What was measured, without the first steps."""
    ratio = module.schedule.ratio(0.0)
    costs = [StepCost.of(module, batch, glances=ratio > 0) for batch in turns.batches[WARM_UP:]]
    operations = sum(cost.total for cost in costs)
    studied = module.config.repeats * sum(
        int((batch.documents >= 0).sum()) for batch in turns.batches[WARM_UP:]
    )
    total = {name: sum(taken[WARM_UP:]) for name, taken in turns.seconds.items()}
    ours = turns.losses[OURS]
    loops = {
        name: {
            "seconds_per_step": median(turns.seconds[name][WARM_UP:]),
            "cpu_seconds_per_step": median(turns.cpu[name][WARM_UP:]),
            "tokens_per_second": studied / total[name],
            "ours_is_faster": total[name] / total[OURS],
            "utilisation": operations / total[name] / machine.operations_per_second,
            "losses": turns.losses[name],
            "loss_difference": max(
                abs(a - b) / b for a, b in zip(turns.losses[name], ours, strict=True)
            ),
        }
        for name in turns.seconds
    }
    mean = {key: sum(getattr(cost, key) for cost in costs) / len(costs) for key in COSTS}
    parts = {name: median(seconds[WARM_UP:]) for name, seconds in turns.parts.items()}
    return {"steps": len(costs), "loops": loops, "parts": parts, "cost": mean}


COSTS = ("teacher", "glance", "student", "heads", "total")
