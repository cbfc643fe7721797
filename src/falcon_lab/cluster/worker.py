"""What one process of a cluster does: write parts of texts and shards of features.

It knows nothing of Ray, and what it writes is what one process alone would have written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab import __version__
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.files import remove_leftovers

if TYPE_CHECKING:
    from falcon_lab.data.datamodule import FalconDataModule
    from falcon_lab.data.feature_store import StorePlan, Teacher

TEXTS, FEATURES = "texts", "features"
"""Kinds of work, in their order."""


@dataclass(frozen=True)
class Unit:
    """A piece of work, which is written whole or not at all.

    Attributes:
        kind: ``TEXTS`` or ``FEATURES``.
        number: of the part, or of the shard.
        size: texts or sequences in it.
        split: of the data, where it is a shard.
    """

    kind: str
    number: int
    size: int
    split: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.split, str(self.number))))


@dataclass(frozen=True)
class Answer:
    """What a worker's method returned, or what was refused: errors do not travel as they are."""

    value: Any = None
    refused: str | None = None


@dataclass(frozen=True)
class Place:
    """Where a worker must find what the others do.

    Attributes:
        folder: in which relative paths begin.
        cache: of targets and texts.
        sign: a file that was written there by who asks.
        content: of that file.
    """

    folder: str
    cache: str
    sign: str
    content: str


class DataWorker:
    """Makes the data of an experiment, unit by unit.

    Args:
        experiment: whose.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self._plans: dict[str, StorePlan] = {}

    def answer(self, method: str, *arguments: Any) -> Answer:
        """Call one of the methods below."""
        try:
            return Answer(getattr(self, method)(*arguments))
        except FalconLabError as error:
            return Answer(refused=f"{socket.gethostname()}: {error}")

    def greet(self, place: Place) -> str:
        """Go where the others are, and return the version of this package.

        Raises:
            FalconLabError: the folder is not there, or is another of that name.
        """
        try:
            os.chdir(place.folder)
            found = Path(place.sign).read_text("utf-8")
        except OSError:
            found = ""
        if found != place.content:
            raise FalconLabError(
                f"{place.sign}: cannot be read here; the working folder, the cache and the feature "
                "store must lie on a disk that all machines share, under the same paths"
            )
        os.environ["FALCON_LAB_CACHE"] = place.cache
        return __version__

    def texts(self) -> list[Unit]:
        """Return the parts of texts that are missing.

        Raises:
            FalconLabError: the data cannot be prepared.
        """
        parts = self._parts
        if parts is None:
            return []
        sizes = enumerate(parts.sizes())
        return [Unit(TEXTS, number, size) for number, size in sizes if not parts.is_there(number)]

    def features(self) -> list[Unit]:
        """Return the shards that are missing.

        Raises:
            FalconLabError: the data cannot be prepared, or the store is another's or has no room.
        """
        from falcon_lab.data.feature_store import begin_store

        self._plans = self.data.plan_features(self.target, self._taps)
        for plan in self._plans.values():
            begin_store(plan)
        return [
            Unit(FEATURES, number, len(plan.index.shard(number)), split)
            for split, plan in self._plans.items()
            for number in plan.missing
        ]

    def write(self, unit: Unit) -> None:
        """Write a unit, unless it is there.

        Raises:
            FalconLabError: it cannot be written.
        """
        from falcon_lab.data.feature_store import write_shard

        if unit.kind == TEXTS:
            assert self._parts is not None
            self.data.write_texts(self._parts, unit.number)
            return
        if not self._plans:
            self.features()
        plan, sequences = self._plans[unit.split], self.data.sequences(unit.split)
        batch_size = self.experiment.data.batch_size
        write_shard(plan, sequences, self._teacher, unit.number, batch_size=batch_size)

    def finish(self) -> list[str]:
        """See that all is there and whole, and return what is to be said of it.

        Raises:
            FalconLabError: something is not.
        """
        said: list[str] = []
        self.data.build_features(self.target, said.append, self._taps)
        remove_leftovers(*(plan.folder for plan in self._plans.values()))
        return said

    @cached_property
    def target(self) -> Any:
        """Return the target, loaded."""
        from falcon_lab.pretraining.target import ensure_target

        return ensure_target(self.experiment.target, lambda line: None, self._components)

    @cached_property
    def data(self) -> FalconDataModule:
        """Return the data of the experiment."""
        from falcon_lab.data.datamodule import FalconDataModule

        return FalconDataModule.for_target(self.experiment.data, self.target)

    @cached_property
    def _components(self) -> Any:
        from falcon_lab.plugins.discovery import load_components

        return load_components()

    @cached_property
    def _parts(self) -> Any:
        return self.data.unwritten_texts()

    @cached_property
    def _taps(self) -> Sequence[int]:
        from falcon_lab.data.datamodule import stored_taps

        experiment = self.experiment
        return stored_taps(experiment.data, self.target, experiment.drafter, self._components)

    @cached_property
    def _teacher(self) -> Teacher:
        return self.data.teacher(self.target, self._plans)
