from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.decoding import chain, speculative
from fakes.drafters import RandomDrafter
from fakes.rules import soft_q
from fakes.table_target import TableTarget
from falcon_lab.acceptance import Greedy
from falcon_lab.decoding.losslessness import greedy_equality, sampled_distance, total_variation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.interfaces import Acceptance, AcceptanceRule
from falcon_lab.sampling import Sampling
from falcon_lab.trees.templates import named

TARGET: Any = TableTarget(5, seed=2)
PLAIN = PlainEngine(TARGET)
PROMPTS = [torch.tensor([1, 2]), torch.tensor([3])]


class Careless(AcceptanceRule):
    """Always accepts the first child."""

    lossless = True

    def __call__(self, tree: Any, logits: Any, *_: Any) -> Acceptance:
        path = [0, 1] if tree.nodes > 1 else [0]
        return Acceptance(torch.tensor(path), logits[path[-1]].argmax())


class SoftQ(Careless):
    """Biased."""

    def __call__(self, *arguments: Any) -> Acceptance:
        return soft_q(*arguments)


def test_an_equal_text_is_called_identical() -> None:
    engine = speculative(TARGET, RandomDrafter(5, 2), named("auto", 2))
    found = greedy_equality(PLAIN, engine, PROMPTS, max_new_tokens=30, stop=StopCondition())
    assert found.passed
    assert found.verdict == "greedy output is identical: 60 tokens over 2 prompts"


def test_a_difference_is_placed_and_the_targets_margin_given() -> None:
    engine = speculative(TARGET, RandomDrafter(5, 2), chain(2), rule=Careless())
    found = greedy_equality(PLAIN, engine, PROMPTS, max_new_tokens=30, stop=StopCondition())
    assert not found.passed
    assert len(found.divergences) == 2
    for divergence, prompt in zip(found.divergences, PROMPTS, strict=True):
        text = [0, *prompt.tolist()]
        for _ in range(divergence.position):
            text.append(int(TARGET.table[text[-2], text[-1]].argmax()))
        logits = TARGET.table[text[-2], text[-1]]
        best = logits.topk(2)
        assert divergence.plain == int(best.indices[0])
        assert divergence.speculative != divergence.plain
        assert divergence.margin == pytest.approx(float(best.values[0] - best.values[1]))
    assert "differs on 2 of 2 prompts" in found.verdict


def test_a_text_that_ends_early_is_a_difference() -> None:
    class Short(PlainEngine):
        def generate(self, prompt: Any, *, max_new_tokens: int, **settings: Any) -> Any:
            return super().generate(prompt, max_new_tokens=max_new_tokens - 1, **settings)

    found = greedy_equality(PLAIN, Short(TARGET), PROMPTS, max_new_tokens=9, stop=StopCondition())
    assert [(d.position, d.speculative) for d in found.divergences] == [(8, None), (8, None)]


def distance(rule: Any = None, joint: bool = False) -> Any:
    class Fixed(RandomDrafter):
        """A drafter with one opinion, so that chosen candidates are always the same."""

        def logits(self, blocks: int) -> torch.Tensor:
            return torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]).expand(blocks, self.block, 5)

    engine = speculative(TARGET, Fixed(5, 2), named("k2-8", 2), rule=rule)
    return sampled_distance(
        PLAIN,
        engine,
        PROMPTS,
        sampling=Sampling(temperature=1.0),
        stop=StopCondition(),
        samples=400 if joint else 200,
        tokens=3 if joint else 4,
        joint=joint,
        resamples=200,
    )


@pytest.mark.parametrize("joint", [False, True])
def test_a_lossless_rule_lies_within_the_noise(joint: bool) -> None:
    found = distance(joint=joint)
    assert found.passed
    assert found.floor > 0
    assert abs(found.distance - found.floor) < found.floor
    assert "within the noise" in found.verdict


@pytest.mark.parametrize("joint", [False, True])
def test_a_biased_rule_does_not(joint: bool) -> None:
    found = distance(SoftQ(), joint)
    assert not found.passed
    assert found.interval[0] > 0
    assert "OUTSIDE the noise" in found.verdict


def test_a_text_that_ended_is_an_outcome_like_any_other() -> None:
    class Mute(PlainEngine):
        def generate(self, prompt: Any, *, max_new_tokens: int, **settings: Any) -> Any:
            return super().generate(prompt, max_new_tokens=1, **settings)

    found = sampled_distance(
        PLAIN,
        Mute(TARGET),
        PROMPTS,
        sampling=Sampling(temperature=1.0),
        stop=StopCondition(),
        samples=40,
        resamples=50,
    )
    assert found.distance == pytest.approx(1.0)
    assert not found.passed


def test_total_variation_is_half_the_absolute_difference() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    assert total_variation(p, q).tolist() == [0.5]


def test_an_error_of_a_component_is_not_swallowed() -> None:
    engine = speculative(TARGET, RandomDrafter(5, 2), chain(2), rule=Greedy(None, None))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="temperature 0"):
        sampled_distance(
            PLAIN, engine, PROMPTS, sampling=Sampling(temperature=1.0), stop=StopCondition()
        )
