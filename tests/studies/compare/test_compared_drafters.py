from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fakes.drafters import TrainedAlone
from falcon_lab.config.schema import DecodingConfig, MethodConfig
from falcon_lab.decoding.assembling import choose_drafter
from falcon_lab.drafters.saved import WEIGHTS
from falcon_lab.measure.engines import Setup
from falcon_lab.studies.compare.drafters import drafters_of

NOWHERE: Any = None


class Head(nn.Linear, TrainedAlone):
    """Has weights, and nothing that compiles them."""


class Trainings(Setup):
    """Has the drafters of all seeds at hand."""

    made: list[Head]

    def drafter(self, config: MethodConfig, trained: Path = NOWHERE) -> tuple[Any, Any]:
        drafter = self.made[int(trained.name)]
        return choose_drafter(drafter, self.experiment.decoding, self.announce), {"name": "mine"}

    def node_of(self, config: MethodConfig, trained: Path | None = NOWHERE) -> Any:
        return {"name": "mine"}


@pytest.mark.parametrize("asked", ["none", "drafter"])
def test_that_a_head_cannot_be_compiled_is_said_once_for_all_its_seeds(
    asked: str, tmp_path: Path
) -> None:
    made, said = [Head(1, 1) for _ in range(3)], list[str]()
    folders = {seed: tmp_path / str(seed) for seed in range(3)}
    for folder in folders.values():
        folder.mkdir()
        (folder / WEIGHTS).touch()
    head = SimpleNamespace(seeds=(0, 1, 2), folders=folders, trains=True)
    base: Any = SimpleNamespace(decoding=DecodingConfig(compile=asked))
    plan: Any = SimpleNamespace(heads=[head], base=base)
    Trainings.made = made
    found = drafters_of(plan, Trainings(base, NOWHERE, NOWHERE, said.append))
    assert said == []  # none is loaded before it is asked for
    assert [one.drafter for one in found] == made
    assert len(said) == (asked == "drafter")
