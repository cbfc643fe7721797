from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fakes.drafters import TrainedAlone
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.studies.compare import contestants

NOWHERE: Any = None


class Head(nn.Linear, TrainedAlone):
    """Has weights, and nothing that compiles them."""


@pytest.mark.parametrize("asked", ["none", "drafter"])
def test_that_a_head_cannot_be_compiled_is_said_once_for_all_its_seeds(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = [Head(1, 1) for _ in range(3)], list[str]()
    drafters = iter(made)
    monkeypatch.setattr(contestants, "drafter_of", lambda *_: (next(drafters), {"name": "mine"}))
    monkeypatch.setattr(contestants, "digest_of", lambda *_: "")
    head = SimpleNamespace(
        seeds=(0, 1, 2), folders=dict.fromkeys(range(3), Path("nowhere")), trains=True
    )
    plan: Any = SimpleNamespace(
        heads=[head], base=SimpleNamespace(decoding=DecodingConfig(compile=asked))
    )
    found = contestants.load_contestants(plan, NOWHERE, NOWHERE, said.append)
    assert [one.drafter for one in found] == made
    assert len(said) == (asked == "drafter")
