from __future__ import annotations

from typing import Any

import pytest
import torch
from falcon_lab_sps import HfLengthConfig
from falcon_lab_sps.hf_length import HfLength
from hypothesis import given
from hypothesis import strategies as st
from sps_cases import drafter, engine, target
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from falcon_lab import fields
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import Budget, BuildContext, RoundOutcome
from falcon_lab.testing import lossless_rounds


def controller(**options: int) -> HfLength:
    return HfLength(HfLengthConfig(**options), BuildContext(target("llama")))


SCHEDULE = GenerationConfig(
    num_assistant_tokens_schedule="heuristic_transient", assistant_confidence_threshold=0
)


class Assistant:
    """What older releases ask of the draft model."""

    generation_config = SCHEDULE


def theirs(start: int, rounds: list[tuple[int, int]]) -> list[int]:
    """The lengths that Hugging Face drafts after each round."""
    generator: Any = object.__new__(AssistedCandidateGenerator)
    generator.assistant_model = Assistant()
    generator.assistant_generation_config = generator.generation_config = SCHEDULE
    generator.num_assistant_tokens = start
    lengths = []
    for drafted, accepted in rounds:
        scores = torch.zeros(1, drafted + 1, 4)
        generator.update_candidate_strategy(torch.zeros(1, 1), scores, accepted)
        lengths.append(int(generator.num_assistant_tokens))
    return lengths


@given(
    start=st.integers(1, 8),
    outcomes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20),
)
def test_it_goes_as_hugging_faces_does(start: int, outcomes: list[tuple[int, int]]) -> None:
    rounds = [(drafted, min(drafted, accepted)) for drafted, accepted in outcomes]
    one, lengths = controller(start=start), []
    for drafted, accepted in rounds:
        one.update(RoundOutcome(drafted, drafted, accepted))
        lengths.append(one.length)
    assert lengths == theirs(start, rounds)


def test_a_round_without_drafts_tells_nothing_and_a_new_text_starts_anew() -> None:
    one = controller(start=4)
    one.update(RoundOutcome(0, 0, 0))
    assert one.budget() == Budget(depth=4)
    one.update(RoundOutcome(4, 4, 4))
    assert one.budget() == Budget(depth=6)
    one.reset()
    assert one.budget() == Budget(depth=4)


def test_it_limits_what_is_drafted() -> None:
    one = controller(start=2, up=3)
    limited = engine("llama", drafter(), {"name": "chain", "depth": 9}, one)
    rounds = lossless_rounds(limited, [[3, 1]], 40)
    expected = 2
    for round_ in rounds[:-4]:
        assert round_.depth == min(expected, 9)
        expected = expected + 3 if round_.accepted == round_.depth else max(1, expected - 1)
    assert len({round_.depth for round_ in rounds[:-4]}) > 1


@pytest.mark.parametrize("options", [{"start": 0}, {"up": -1}, {"down": -1}])
def test_numbers_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        fields.options(HfLengthConfig, options, "controller")
