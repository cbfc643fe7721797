"""The checks that decode find a text that is not the target's, and rounds that are not the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.acceptance import Auto
from falcon_lab.interfaces import Acceptance, Observation
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components
from falcon_lab.sampling import Sampling
from falcon_lab.testing import ContractError, drafters, tiny_target
from falcon_lab.testing.drafter_case import Case
from falcon_lab.testing.tested import ComponentUnderTest
from falcon_lab.tree import TokenTree
from generated import modules

package, module = modules("drafter")
GRU: Any = module.Head


class Mine(GRU):
    def __init__(self, context: Any) -> None:
        super().__init__(package.HeadConfig(width=24), context)


class LastPartAlone(Mine):
    def observe(self, observation: Observation) -> None:
        if not observation.remaining:
            super().observe(observation)


Change = Callable[[Acceptance, TokenTree, Tensor, torch.Generator], Acceptance]


def case(drafter: Any = Mine, change: Change | None = None) -> Case:
    """A drafter in front of an acceptance rule that does not do what it should."""
    tested = ComponentUnderTest("drafter", drafter)
    if change is not None:
        others = [c for c in load_components().components if c.name != "auto"]
        rule = Component("acceptance_rule", "auto", lambda *_: Changed(change), None, "mine", "0")
        tested.components = Components([*others, rule])
    return Case(tested, tiny_target(vocab=12, positions=48))


class Changed:
    lossless = True

    def __init__(self, change: Change) -> None:
        self._auto, self._change = Auto(None, Any), change  # type: ignore[arg-type]

    def __call__(
        self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
    ) -> Acceptance:
        found = self._auto(tree, logits, sampling, generator)
        return self._change(found, tree, logits, generator)


def first_child(found: Acceptance, tree: TokenTree, *_: Any) -> Acceptance:
    """Takes a draft that the target has not looked at."""
    return found if tree.nodes < 2 else replace(found, path=torch.tensor([0, 1]))


def likeliest(found: Acceptance, tree: TokenTree, logits: Tensor, *_: Any) -> Acceptance:
    return replace(found, next_token=logits[found.path[-1]].argmax())


def drawing(found: Acceptance, *given: Any) -> Acceptance:
    torch.rand((), generator=given[-1])
    return found


@pytest.mark.parametrize(
    ("check", "change", "said"),
    [
        (drafters.check_greedy, first_child, "greedy text with a chain"),
        (drafters.check_budgets, first_child, "a budget of one"),
        (drafters.check_seeds, drawing, "the text of a seed"),
        (drafters.check_sampled, likeliest, "the distribution of sampled text"),
        (drafters.check_sampled, first_child, "the distribution of sampled text"),
    ],
)
def test_a_text_that_is_not_the_targets_is_found(
    check: Callable[[Case], None], change: Change, said: str
) -> None:
    check(case())
    with pytest.raises(ContractError, match=said):
        check(case(change=change))


def test_a_part_of_the_prompt_that_is_dropped_is_seen_in_the_rounds() -> None:
    drafters.check_chunks(case())
    with pytest.raises(ContractError, match="chunks of 3 tokens"):
        drafters.check_chunks(case(LastPartAlone))
