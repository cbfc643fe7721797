"""The check of a draft-length controller.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundOutcome
from falcon_lab.model.target import Target
from falcon_lab.testing.decoding import engine, expect_greedy, expect_whole
from falcon_lab.testing.reference import ReferenceDrafter
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

OUTCOMES = [
    RoundOutcome(drafted, nodes, accepted)
    for drafted, nodes, accepted in (
        *((4, 4, 4), (6, 12, 6), (8, 16, 0), (1, 1, 0), (1, 1, 1)),
        *((0, 0, 0), (5, 9, 2), (0, 0, 0), (3, 3, 3), (2, 7, 0)),
    )
]
"""Rounds that were accepted, refused, or drafted nothing."""


def check_controller(controller: Recipe, *, seed: int = 0) -> None:
    """Check that a draft-length controller does what its kind requires.

    - ``budget`` is a ``Budget`` of whole numbers, before the first round and after any outcome, a
      round without drafts among them.
    - ``keep_going`` says yes or no to any pass, and changes nothing of it.
    - ``reset`` leaves nothing behind, and what it decides follows from the outcomes alone.
    - Greedy text with it is the target's own, and decoding reaches the end.

    Args:
        controller: a YAML node, or what builds a controller from a ``BuildContext``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("controller", controller, seed)
    target = tiny_target(vocab=12, positions=48)
    for block in (1, 3):
        with tested.checking(f"budgets and answers for blocks of {block}"):
            check_decisions(tested, target, block)
        with tested.checking(f"decoding with blocks of {block}"):
            check_decoding(tested, target, block)


def check_decisions(tested: ComponentUnderTest, target: Target, block: int) -> None:
    """Check what it decides in many rounds, once and again after ``reset``."""
    made = tested.build(BuildContext(target, block))
    made.reset()
    first = decisions(tested, made, block, OUTCOMES)
    made.reset()
    again = decisions(tested, made, block, OUTCOMES)
    tested.expect(
        first == again,
        "its decisions in a second text",
        expected=f"those in the first, {first}",
        found=again,
        fix="forget everything in reset(), and draw nothing at random",
    )
    copies = [copy.deepcopy(made) for _ in range(2)]
    for each in copies:
        each.reset()
    decisions(tested, copies[0], block, OUTCOMES[:3])
    other = decisions(tested, copies[1], block, OUTCOMES)
    tested.expect(
        other == first,
        "its decisions beside those of a copy, as in a batch",
        expected=first,
        found=other,
        fix="keep its state in its own attributes",
    )


def decisions(
    tested: ComponentUnderTest, made: Any, block: int, outcomes: Sequence[RoundOutcome]
) -> list[Any]:
    """Return the budgets and answers of rounds with these outcomes."""
    found: list[Any] = []
    for number, outcome in enumerate(outcomes):
        budget = made.budget()
        _check_budget(tested, budget, number)
        found.append((budget.depth, budget.nodes, budget.passes))
        for passes in range(1, 4):
            output = _output(tested, block, 3 * number + passes, 1 if passes == 1 else 3)
            before = output.logits.clone()
            answer = made.keep_going(passes, output)
            tested.expect(
                isinstance(answer, bool),
                f"keep_going after pass {passes}",
                expected="True or False",
                found=repr(answer),
                fix="turn a tensor into a bool",
            )
            tested.expect(
                torch.equal(output.logits, before),
                "the logits that keep_going is shown",
                expected="left as they are",
                found="changed in place",
                fix="clone what you want to change",
            )
            found.append(answer)
        made.update(outcome)
    _check_budget(tested, made.budget(), len(outcomes))
    return found


def _check_budget(tested: ComponentUnderTest, budget: Any, rounds: int) -> None:
    parts = (budget.depth, budget.nodes, budget.passes) if isinstance(budget, Budget) else (budget,)
    right = isinstance(budget, Budget) and all(
        part is None or (isinstance(part, int) and not isinstance(part, bool) and part >= 0)
        for part in parts
    )
    tested.expect(
        right,
        f"budget() after {rounds} rounds",
        expected="a Budget of whole numbers of at least 0, or None",
        found=repr(budget),
        fix="round down, and never go below 0",
    )


def _output(tested: ComponentUnderTest, block: int, number: int, blocks: int) -> DraftOutput:
    """Make a pass that is sure, or not, and does not propose everything."""
    generator = tested.generator(80 + number)
    logits = (1 + number % 4) * torch.randn(blocks, block, 12, generator=generator)
    return DraftOutput(logits.masked_fill(logits < -4, -torch.inf))


def check_decoding(tested: ComponentUnderTest, target: Target, block: int) -> None:
    """Check greedy text that is decoded with it, for a chain and a dynamic tree."""
    for node in ({"name": "chain", "depth": 6}, {"name": "dynamic", "nodes": 10}):
        drafter = ReferenceDrafter(target.vocab_size, block)
        made = tested.build(BuildContext.of(target, drafter))
        known = tested.components
        decoding = engine(target, drafter, tree=node, controller=made, components=known)
        expect_greedy(tested, target, decoding, f"the controller and {node['name']}")
    expect_whole(tested, target, decoding, "the controller")
