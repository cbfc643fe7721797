from __future__ import annotations

import torch

from fakes.decoding import CONTEXT
from falcon_lab.controllers import Fixed
from falcon_lab.interfaces import Budget, DraftOutput, LengthController, RoundOutcome
from falcon_lab.plugins.builtins import FixedConfig


def test_the_budget_is_the_configured_one_whatever_happens() -> None:
    controller: LengthController = Fixed(FixedConfig(depth=3, nodes=9, passes=2), CONTEXT)
    for accepted in (0, 3):
        assert controller.budget() == Budget(depth=3, nodes=9, passes=2)
        assert controller.keep_going(1, DraftOutput(torch.zeros(1, 1, 2)))
        controller.update(RoundOutcome(drafted=3, nodes=9, accepted=accepted))
        controller.reset()


def test_what_is_left_out_is_left_to_the_tree_builder() -> None:
    assert Fixed(FixedConfig(), CONTEXT).budget() == Budget()
