"""Hold a plan against what a finished run measured: bytes of its files, and speeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from falcon_lab.config.saved import DRAFTER, HISTORY, RESULTS
from falcon_lab.config.schema import PLAIN, Experiment
from falcon_lab.data.datamodule import SPLITS
from falcon_lab.data.feature_index import INDEX, read_index
from falcon_lab.data.feature_store import shard_path
from falcon_lab.drafters.saved import CONFIG, WEIGHTS
from falcon_lab.errors import FalconLabError
from falcon_lab.files import about
from falcon_lab.folders import whole
from falcon_lab.history import read_history
from falcon_lab.measure.results import load_results
from falcon_lab.studies.scale.arithmetic import (
    Assumed,
    DrafterCost,
    Hardware,
    TargetCost,
    Work,
    decoding_rate,
    drafter_operations,
    rate,
    read_operations,
)

TEACHER = "train/time/teacher"
STUDENT = tuple(f"train/time/{part}" for part in ("student", "loss", "backward", "optimizer"))
GLANCE = "train/time/glance"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which the tensors follow."""


@dataclass(frozen=True)
class Comparison:
    """One figure of a plan and of a run.

    Attributes:
        what: names it.
        unit: ``bytes`` or ``tokens/s``.
        planned: by arithmetic.
        measured: in the run.
        share: of the peak that the run reached, where the plan assumed one.
    """

    what: str
    unit: str
    planned: float
    measured: float
    share: float | None = None

    @property
    def ratio(self) -> float:
        """Return measured over planned."""
        return self.measured / self.planned


def compare(
    run: Path,
    experiment: Experiment,
    target: TargetCost,
    drafter: DrafterCost | None,
    work: Work,
    hardware: Hardware,
    assumed: Assumed,
) -> list[Comparison]:
    """Return every figure that a run's folder has a measurement of.

    Args:
        run: its folder.
        experiment: as it was run.
        target: counted.
        drafter: counted; None where nothing was trained.
        work: of the run.
        hardware: that it ran on.
        assumed: as the plan does.

    Raises:
        FalconLabError: the folder has no measurement, or a file of it is damaged.
    """
    found = [
        *_bytes(run, experiment, drafter, work),
        *_training(run, experiment, target, drafter, hardware, assumed),
        *_decoding(run, target, hardware, assumed),
    ]
    if not found:
        raise FalconLabError(
            f"{run}: nothing to compare with: no saved drafter, feature store, curves or results; "
            "name the folder of a finished run"
        )
    return found


def _bytes(
    run: Path, experiment: Experiment, drafter: DrafterCost | None, work: Work
) -> Iterator[Comparison]:
    saved = whole(run / DRAFTER, CONFIG) / WEIGHTS
    if drafter is not None and saved.is_file():
        yield Comparison("drafter", "bytes", drafter.bytes, tensor_bytes(saved))
    for split in SPLITS if experiment.data.feature_store else ():
        folder = Path(str(experiment.data.feature_store)) / split
        if (folder / INDEX).is_file():
            index = read_index(folder)
            files = [shard_path(folder, number) for number in range(index.shards)]
            if all(file.is_file() for file in files):
                planned = index.rows * index.length * work.position_bytes
                measured = sum(map(tensor_bytes, files))
                yield Comparison(f"feature store, {split}", "bytes", planned, measured)


def tensor_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file's tensors, without its header.

    Raises:
        FalconLabError: it cannot be read.
    """
    with about(path, "read"), path.open("rb") as file:
        header = int.from_bytes(file.read(LENGTH_BYTES), "little")
        return path.stat().st_size - LENGTH_BYTES - header


def _training(
    run: Path,
    experiment: Experiment,
    target: TargetCost,
    drafter: DrafterCost | None,
    hardware: Hardware,
    assumed: Assumed,
) -> Iterator[Comparison]:
    history = read_history(run / HISTORY)
    timed = [line for line in history if all(key in line for key in (TEACHER, *STUDENT))]
    if drafter is None or not timed:
        return
    tokens = experiment.data.batch_size * experiment.data.length
    if experiment.data.feature_store is None:
        speed = tokens / median(line[TEACHER] for line in timed)
        yield _reached("teacher", rate(read_operations(target), hardware, assumed), speed, assumed)
    glanced = [line for line in timed if line.get("train/glance_ratio", 0) > 0]
    for what, lines, glances in (
        ("student", timed, 0) if not glanced else ("student and glance", glanced, drafter.glances),
    ):
        operations = drafter_operations(replace(drafter, glances=glances))
        speed = tokens / median(_seconds(line) for line in lines)
        yield _reached(what, rate(operations, hardware, assumed), speed, assumed)


def _seconds(line: Mapping[str, Any]) -> float:
    return sum(float(line[key]) for key in STUDENT) + float(line.get(GLANCE, 0.0))


def _reached(what: str, planned: float, measured: float, assumed: Assumed) -> Comparison:
    share = assumed.utilisation * measured / planned
    return Comparison(what, "tokens/s", planned, measured, share)


def _decoding(
    run: Path, target: TargetCost, hardware: Hardware, assumed: Assumed
) -> Iterator[Comparison]:
    if not (run / RESULTS).is_file():
        return
    methods: Mapping[str, Any] = load_results(run)["methods"]
    measured = methods.get(PLAIN, {}).get("decode_tokens_per_second")
    if measured:
        planned = decoding_rate(target, hardware, replace(assumed, sequences=1))
        share = assumed.reach * measured / planned
        yield Comparison("plain decoding", "tokens/s", planned, measured, share)


def rows(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return comparisons for programs."""
    return [
        {
            "what": each.what,
            "unit": each.unit,
            "planned": each.planned,
            "measured": each.measured,
            "ratio": each.ratio,
            "share_of_peak": each.share,
        }
        for each in found
    ]
