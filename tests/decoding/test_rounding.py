from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.decoding import chain, speculative
from fakes.drafters import RandomDrafter
from fakes.rounding_target import SPACING, RoundingTarget
from fakes.table_target import TableTarget
from falcon_lab.decoding.losslessness import greedy_equality
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.rounding import is_tie, read_again
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.interfaces import Acceptance, AcceptanceRule
from falcon_lab.model.target import Target
from falcon_lab.sampling import Sampling
from falcon_lab.trees.templates import named
from tiny_models import tiny_target

PROMPTS = [torch.tensor([first, second]) for first in range(5) for second in range(3)]
CLOSE: Any = {"vocab": 6, "scale": 0.2}


def text_of(target: Any, prompt: torch.Tensor, tokens: int = 40) -> list[int]:
    generation = PlainEngine(target).generate(
        prompt,
        max_new_tokens=tokens,
        sampling=Sampling(),
        generator=torch.Generator(),
        stop=StopCondition(),
    )
    return list(generation.tokens)


def half(target: Any) -> Any:
    """The target as one of a type whose rounding is an excuse."""
    target.dtype = torch.bfloat16
    return target


def noise_of(target: Any, prompt: torch.Tensor, tokens: list[int]) -> float:
    found = read_again(target, prompt, tokens).noise
    assert found is not None
    return found


@pytest.mark.parametrize("place", [0, 1, 7])
def test_what_is_read_again_are_the_logits_that_plain_decoding_chose_by(place: int) -> None:
    target: Any = RoundingTarget(**CLOSE)
    for dtype in (torch.bfloat16, torch.float32):
        target.dtype = dtype
        text = text_of(target, PROMPTS[0])
        found = read_again(target, PROMPTS[0], text)
        assert len(found.logits) == len(text) + 1
        assert int(found.logits[place].argmax()) == text[place]
        assert (found.noise is None) == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("gap", "noise", "tie"),
    [
        (0.1, 0.125, True),
        (-0.125, 0.125, True),
        (0.25, 0.125, False),
        (0.0, None, False),
        (None, 0.125, False),
    ],
)
def test_texts_part_at_a_tie_where_rounding_moves_the_gap_as_far(
    gap: float | None, noise: float | None, tie: bool
) -> None:
    assert is_tie(gap, noise) is tie


def test_where_no_width_matters_there_is_no_noise() -> None:
    target = half(TableTarget(5, seed=2))
    assert noise_of(target, PROMPTS[0], text_of(target, PROMPTS[0])) == 0


def test_noise_is_at_least_the_spacing_of_what_the_width_rounds() -> None:
    target: Any = RoundingTarget(**CLOSE)
    found = noise_of(target, PROMPTS[0], text_of(target, PROMPTS[0]))
    assert SPACING <= found <= 2 * SPACING


def test_a_text_without_tokens_has_none() -> None:
    assert noise_of(half(TableTarget(5)), PROMPTS[0], []) == 0


def test_a_model_in_bfloat16_has_noise_and_in_float32_none_is_asked_for() -> None:
    target: Target = tiny_target("llama")
    prompt = torch.arange(1, 9)
    assert read_again(target, prompt, text_of(target, prompt, 24)).noise is None
    target.model.to(torch.bfloat16)
    assert 1e-4 <= noise_of(target, prompt, text_of(target, prompt, 24)) < 1.0


def equality(target: Any, rule: AcceptanceRule | None = None) -> Any:
    engine = speculative(target, RandomDrafter(6, 2), named("auto", 2), rule=rule)
    return greedy_equality(
        PlainEngine(target), engine, PROMPTS, max_new_tokens=60, stop=StopCondition()
    )


def test_texts_that_part_where_rounding_decides_have_parted_at_ties() -> None:
    found = equality(RoundingTarget(**CLOSE))
    assert found.divergences
    assert found.faults == ()
    assert found.passed
    assert "parts at ties alone" in found.verdict
    assert all(each.gap <= found.noise <= 2 * SPACING for each in found.divergences)


class Careless(AcceptanceRule):
    """Always accepts the first child."""

    lossless = True

    def __call__(self, tree: Any, logits: Any, *_: Any) -> Acceptance:
        path = [0, 1] if tree.nodes > 1 else [0]
        return Acceptance(torch.tensor(path), logits[path[-1]].argmax())


def test_a_wrong_token_is_a_fault_however_much_is_rounded() -> None:
    target: Any = RoundingTarget(6)
    engine = speculative(target, RandomDrafter(6, 2), chain(2), rule=Careless())
    found = greedy_equality(
        PlainEngine(target), engine, PROMPTS, max_new_tokens=30, stop=StopCondition()
    )
    assert not found.passed
    assert "differs on" in found.verdict
    assert "passes of other widths" in found.verdict


def test_in_float32_a_tie_is_no_excuse() -> None:
    target = RoundingTarget(**CLOSE)
    target.dtype = torch.float32
    found = equality(target)
    assert found.divergences
    assert not found.passed
