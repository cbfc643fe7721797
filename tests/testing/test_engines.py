from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.decoding.plain import PartEngine, PlainEngine
from falcon_lab.interfaces import EngineContext, LayerPlan
from falcon_lab.sampling import Sampling
from falcon_lab.testing import ContractError, check_engine


class Forgetful(PlainEngine):
    """Writes one token less than it was asked for."""

    def generate(self, prompt: Tensor, **given: Any) -> Any:
        return super().generate(prompt, **{**given, "max_new_tokens": given["max_new_tokens"] - 1})


class Learning(PlainEngine):
    """Writes something else the second time."""

    def generate(self, prompt: Tensor, **given: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().generate(prompt.new_full((self.count,), 3), **given)


class Biased(PlainEngine):
    """Takes the likeliest tokens whatever it is asked."""

    def generate(self, prompt: Tensor, **given: Any) -> Any:
        return super().generate(prompt, **{**given, "sampling": Sampling()})


def plain(context: EngineContext) -> PlainEngine:
    return PlainEngine(context.target, decoding=context.decoding)


def part(context: EngineContext) -> PartEngine:
    return PartEngine(context.target, LayerPlan(skip_mlp=frozenset({1})))


def lying(context: EngineContext) -> PartEngine:
    made = part(context)
    made.lossless = True
    return made


@pytest.mark.parametrize("make", [plain, part])
def test_engines_that_keep_their_promises_pass(make: Callable[[EngineContext], Any]) -> None:
    check_engine(make)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda context: Forgetful(context.target), "together|length"),
        (lambda context: Learning(context.target), "again"),
        (lambda context: Biased(context.target), "distribution"),
        (lying, "the target's own"),
        (lambda context: torch.nn.Identity(), "Engine"),
    ],
    ids=["forgetful", "learning", "biased", "lying", "nothing"],
)
def test_a_planted_defect_is_found(make: Callable[[EngineContext], Any], what: str) -> None:
    with pytest.raises(ContractError, match=what):
        check_engine(make)
