"""A component that does not derive from its kind's class gets what that class has by default."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.decoding import CONTEXT
from falcon_lab.acceptance import Greedy
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    AcceptanceRule,
    Budget,
    Drafter,
    DraftOutput,
    Frontier,
    GlancingSchedule,
    LengthController,
    Observation,
)
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components


class Plain:
    block = 2
    needs = frozenset[str]()

    def reset(self, first: Tensor) -> None: ...

    def observe(self, observation: Observation) -> None: ...

    def draft(self, frontier: Frontier) -> DraftOutput:
        return DraftOutput(torch.zeros(1, self.block, 3))


class Weights(Plain, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.taps = (1,)


class Slots(Plain):
    __slots__ = ("max_passes",)

    def __init__(self) -> None:
        self.max_passes = 3


class Allocating(Plain):
    def __init__(self) -> None:
        self.kv_allocated = 64

    def kv_bytes(self, positions: int, tree: Any) -> int:
        return 8 * positions


def built(kind: str, build: Any) -> Any:
    component = Component(kind, "mine", lambda config, context: build(), None, "theirs", "1")
    return Components([component]).build(kind, {"name": "mine"}, CONTEXT)


@pytest.mark.parametrize("own", [Plain, Weights, Slots, Allocating])
def test_a_drafter_has_all_members_and_its_own_come_first(own: type) -> None:
    made = built("drafter", own)
    assert isinstance(made, own)
    assert isinstance(made, Drafter)
    assert (type(made).__name__, type(made).__module__) == (own.__name__, own.__module__)
    assert made.block == 2
    assert made.draft(Frontier.root(torch.device("cpu"))).logits.shape == (1, 2, 3)
    assert made.max_passes == (3 if own is Slots else None)
    assert made.taps == ((1,) if own is Weights else ())
    assert made.kv_allocated == (64 if own is Allocating else 0)
    assert made.kv_bytes(5, None) == (40 if own is Allocating else 0)
    assert (made.max_auxiliary, made.is_compiled, made.unrolls) == (0, False, False)
    assert made.sequences(2, 5, None) is None
    with pytest.raises(FalconLabError, match=f"{own.__name__} cannot be trained on its own pred"):
        made.unroll(None)


def test_it_may_be_copied_and_all_of_one_class_have_one_class() -> None:
    made, other = built("drafter", Slots), built("drafter", Slots)
    again = copy.deepcopy(made)
    assert type(again) is type(made) is type(other)
    assert again.max_passes == 3


def test_a_module_stays_a_module_and_says_that_it_is_not_compiled() -> None:
    made, said = built("drafter", Weights), list[str]()
    assert list(made.state_dict()) == ["layer.weight", "layer.bias"]
    assert made.compiled(said.append) is made
    assert said == ["Weights is not compiled: it has no passes that could be"]


def test_what_derives_from_the_class_is_left_as_it_is() -> None:
    assert type(built("acceptance_rule", lambda: Greedy(None, CONTEXT))) is Greedy


def test_a_rule_a_controller_and_a_schedule_need_no_base_either() -> None:
    class Rule:
        lossless = True

        def __call__(self, *given: Any) -> str:
            return "own"

        def accept_padded(self, *given: Any) -> str:
            return "padded"

    class Anew(Rule):
        def __call__(self, *given: Any) -> str:
            return "anew"

    class Length:
        def budget(self) -> Budget:
            return Budget(depth=1)

    class Schedule:
        token_source = "data"

        def ratio(self, progress: float) -> float:
            return 0.0

        def reveal(self, *given: Any) -> None: ...

    rule, anew = built("acceptance_rule", Rule), built("acceptance_rule", Anew)
    assert isinstance(rule, AcceptanceRule)
    assert (rule(), rule.accept_padded()) == ("own", "padded")
    assert (anew(), anew.accept_padded(None, None, None, None)) == ("anew", None)
    length = built("controller", Length)
    assert isinstance(length, LengthController)
    assert length.keep_going(1, None)
    assert (length.update(None), length.reset()) == (None, None)
    schedule = built("schedule", Schedule)
    assert isinstance(schedule, GlancingSchedule)
    assert (schedule.token_source, schedule.keep_revealed_in_loss) == ("data", True)
    assert not schedule.chooses_rows


def test_what_has_no_class_of_its_own_is_refused_with_what_to_derive_from() -> None:
    with pytest.raises(FalconLabError, match=r"theirs/mine is a function; derive its class from "):
        built("acceptance_rule", lambda: built)
