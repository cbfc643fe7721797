from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fakes.decoding import CONTEXT
from falcon_lab.controllers import Confidence
from falcon_lab.interfaces import Budget, DraftOutput, LengthController
from falcon_lab.plugins.builtins import ConfidenceConfig


def _output(*blocks: list[float]) -> DraftOutput:
    """``[F, k, 2]`` logits: in every row the likelier of two tokens has the probability given."""
    rows = torch.tensor([[[p, 1 - p] for p in block] for block in blocks])
    return DraftOutput(rows.log())


def _controller(threshold: float) -> LengthController:
    return Confidence(ConfidenceConfig(threshold=threshold), CONTEXT)


def test_it_drafts_on_until_the_product_of_first_candidates_is_below_the_threshold() -> None:
    controller = _controller(0.5)
    assert controller.keep_going(1, _output([0.9, 0.9]))  # 0.81
    assert controller.keep_going(2, _output([0.9, 0.8]))  # 0.58
    assert not controller.keep_going(3, _output([0.9, 0.9]))  # 0.47


def test_every_round_starts_with_full_confidence() -> None:
    controller = _controller(0.5)
    assert not controller.keep_going(1, _output([0.6, 0.6]))
    assert controller.keep_going(1, _output([0.8, 0.8]))


def test_the_first_block_of_a_pass_alone_counts() -> None:
    controller = _controller(0.5)
    assert controller.keep_going(1, _output([0.9], [0.51]))
    assert not _controller(0.5).keep_going(1, _output([0.5001, 0.9], [1.0, 1.0]))


def test_logits_need_not_be_normalised() -> None:
    shifted = DraftOutput(_output([0.6]).logits + 100)
    assert _controller(0.59).keep_going(1, shifted)
    assert not _controller(0.61).keep_going(1, shifted)


@pytest.mark.parametrize("logits", [torch.full((1, 2, 3), -torch.inf), torch.zeros(1, 2, 3)])
def test_a_drafter_that_proposes_nothing_or_knows_nothing_is_not_asked_again(
    logits: Tensor,
) -> None:
    assert not _controller(0.3).keep_going(1, DraftOutput(logits))


def test_the_budget_is_the_configured_one() -> None:
    config = ConfidenceConfig(depth=3, nodes=9, passes=2)
    assert Confidence(config, CONTEXT).budget() == Budget(depth=3, nodes=9, passes=2)
