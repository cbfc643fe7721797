"""Every promise of acceptance rules, schedules, controllers and objectives, broken and found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fakes.rules import resample_from_p, soft_q
from falcon_lab.acceptance import Auto, Greedy, SamplingRule, accept_sampled
from falcon_lab.errors import FalconLabError
from falcon_lab.glancing import Csgd
from falcon_lab.interfaces import (
    Acceptance,
    Budget,
    BuildContext,
    DraftOutput,
    GlanceRows,
    LabelledRows,
    PaddedAcceptance,
    RoundOutcome,
)
from falcon_lab.objectives import FalconObjective
from falcon_lab.plugins.builtins import CsgdConfig, FalconObjectiveConfig
from falcon_lab.sampling import Sampling
from falcon_lab.testing import (
    ContractError,
    check_acceptance,
    check_controller,
    check_objective,
    check_schedule,
)
from falcon_lab.tree import TokenTree
from generated import modules

Build = Callable[[BuildContext], Any]

# --- acceptance rules ---------------------------------------------------------------------------

Rule = Callable[[TokenTree, Tensor, Sampling, torch.Generator], Acceptance]


def ruling(change: Callable[..., Acceptance], *, lossless: Any = True) -> Build:
    """A rule that decides as ``auto``, given out otherwise."""

    class Ruling:
        def __init__(self, context: BuildContext) -> None:
            self._auto = Auto(None, context)
            self.lossless = lossless

        def __call__(
            self, tree: TokenTree, logits: Tensor, sampling: Sampling, generator: torch.Generator
        ) -> Acceptance:
            found = self._auto(tree, logits, sampling, generator)
            return change(found, tree, logits, sampling, generator)

    return Ruling


def sampled_by(rule: Rule) -> Build:
    """A rule that is ``auto`` at temperature 0, and biased above it."""

    def decide(found: Acceptance, tree: TokenTree, *rest: Any) -> Acceptance:
        return found if rest[1].greedy else rule(tree, *rest)

    return ruling(decide)


def as_drawn(tree: TokenTree, *rest: Any) -> Acceptance:
    if tree.proposal != "mixed":
        return SamplingRule(None, rest[0])(tree, *rest)
    return accept_sampled(replace(tree, q_row=tree.parents), *rest)


class OtherPadding(Greedy):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(None, context)

    def accept_padded(self, *given: Any) -> PaddedAcceptance | None:
        padded = super().accept_padded(*given)
        return padded and replace(padded, next_token=(padded.next_token + 1) % 6)


class NoneAtAll(Greedy):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(None, context)

    def __call__(self, *given: Any) -> Acceptance:
        raise FalconLabError("never")


def overwrite(found: Acceptance, tree: TokenTree, logits: Tensor, *rest: Any) -> Acceptance:
    logits[0] = 0
    return found


RULES: dict[str, tuple[Build, str]] = {
    "a path without its root": (
        ruling(lambda found, *_: replace(found, path=found.path[1:])),
        "the accepted path",
    ),
    "a path that jumps": (
        ruling(lambda found, tree, *_: replace(found, path=torch.tensor([0, tree.nodes - 1]))),
        "the accepted path",
    ),
    "a token with a dimension": (
        ruling(lambda found, *_: replace(found, next_token=found.next_token[None])),
        "next_token",
    ),
    "numbers from nowhere": (
        ruling(lambda found, *_: replace(found, next_token=torch.randint(6, ()))),
        "the same generator",
    ),
    "logits that are overwritten": (ruling(overwrite), "changed in place"),
    "a rule that does not say": (ruling(lambda found, *_: found, lossless=None), "lossless"),
    "nothing but refusals": (NoneAtAll, "temperatures"),
    "padding that decides otherwise": (OtherPadding, "accept_padded"),
    "a path that stops early": (
        ruling(lambda found, tree, *_: Acceptance(found.path[:1], found.next_token)),
        "a greedy round",
    ),
    "the root's choice after the path": (
        ruling(lambda found, tree, logits, *_: replace(found, next_token=logits[0].argmax())),
        "a greedy round",
    ),
    "soft probabilities of chosen candidates": (
        sampled_by(soft_q),
        "the output for deterministic trees",
    ),
    "a correction with what was refused in it": (
        sampled_by(resample_from_p),
        "the output for deterministic trees",
    ),
    "chosen candidates that are taken for drawn ones": (
        sampled_by(as_drawn),
        "the output for mixed trees",
    ),
    "the likeliest token in place of a draw": (
        ruling(
            lambda found, tree, logits, *_: replace(
                found, next_token=logits[found.path[-1]].argmax()
            )
        ),
        "the distribution of the output",
    ),
}


@pytest.mark.parametrize("defect", RULES)
def test_a_planted_defect_of_a_rule_is_found_and_named(defect: str) -> None:
    build, said = RULES[defect]
    with pytest.raises(ContractError, match=said):
        check_acceptance(build)


def test_a_lossy_rule_that_says_so_passes() -> None:
    check_acceptance(
        ruling(lambda found, *_: Acceptance(found.path[:1], found.next_token), lossless=False)
    )


# --- schedules ----------------------------------------------------------------------------------


class Glancing(Csgd):
    """Keeps all promises."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(CsgdConfig(), context)


def shown(change: Callable[..., Tensor]) -> Build:
    class Showing(Glancing):
        def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
            return change(super().reveal(rows, ratio, generator), rows, ratio, generator)

    return Showing


class Rising(Glancing):
    def ratio(self, progress: float) -> float:
        return 2 * progress


class Sourceless(Glancing):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.token_source: Any = "student"


class Undecided(Glancing):
    keep_revealed_in_loss: Any = None

    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.keep_revealed_in_loss = None


class CountingAll(Glancing):
    def counts(self, rows: GlanceRows) -> Tensor:
        return torch.ones_like(rows.valid)


def forget(mask: Tensor, rows: GlanceRows, *_: Any) -> Tensor:
    rows.wrong.zero_()
    return mask


SCHEDULES: dict[str, tuple[Build, str]] = {
    "more than everything": (Rising, r"ratio\(0.55\)"),
    "tokens of nobody": (Sourceless, "token_source"),
    "no word about the loss": (Undecided, "keep_revealed_in_loss"),
    "rows that do not count": (
        shown(lambda mask, rows, ratio, _: mask | (~rows.valid & (ratio > 0))),
        "that do not",
    ),
    "more rows than were wrong": (
        shown(lambda mask, rows, ratio, _: rows.valid & (ratio > 0)),
        "at most the rows that were wrong",
    ),
    "rows when none are asked for": (
        shown(lambda mask, rows, ratio, _: rows.wrong),
        "none at λ = 0",
    ),
    "more than λ·d": (
        shown(lambda mask, rows, ratio, _: rows.wrong & (ratio > 0)),
        "on average at λ = 0.3",
    ),
    "numbers instead of a mask": (shown(lambda mask, *_: mask.long()), r"reveal\(\)"),
    "a draw from nowhere": (
        shown(lambda mask, *_: mask & (torch.rand(mask.shape) < 0.5)),
        "one state of the generator",
    ),
    "rows that are overwritten": (shown(forget), "changed in place|one state"),
    "rows in the loss that do not count": (CountingAll, r"counts\(\)"),
}


@pytest.mark.parametrize("defect", SCHEDULES)
def test_a_planted_defect_of_a_schedule_is_found_and_named(defect: str) -> None:
    build, said = SCHEDULES[defect]
    with pytest.raises(ContractError, match=said):
        check_schedule(build)


# --- controllers --------------------------------------------------------------------------------

package, module = modules("controller")
FOLLOWING: Any = module.Following


class Mine(FOLLOWING):
    """The generated controller, which keeps all promises."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(package.FollowingConfig(), context)


class Negative(Mine):
    def budget(self) -> Budget:
        return Budget(depth=-1 if (self._accepted or 9) < 3 else 4)


class Fractional(Mine):
    def budget(self) -> Budget:
        return Budget(depth=(self._accepted or 4) / 2)


class Unsure(Mine):
    def keep_going(self, passes: int, output: DraftOutput) -> Any:
        return output.logits.max() > 0


class Overwriting(Mine):
    def keep_going(self, passes: int, output: DraftOutput) -> bool:
        output.logits.mul_(2)
        return True


class Remembering(Mine):
    def reset(self) -> None:
        if not hasattr(self, "_accepted"):
            super().reset()


class Shared(Mine):
    rounds: ClassVar[list[int]] = []

    def budget(self) -> Budget:
        return Budget(depth=3 + len(self.rounds))

    def update(self, outcome: RoundOutcome) -> None:
        self.rounds.append(1)

    def reset(self) -> None:
        if not hasattr(self, "_begun"):
            self.rounds.clear()
        super().reset()


CONTROLLERS: dict[str, tuple[Build, str]] = {
    "a budget below nothing": (Negative, r"budget\(\) after 3 rounds.*depth=-1"),
    "half a token": (Fractional, r"budget\(\) after"),
    "an answer that is a tensor": (Unsure, "keep_going after pass 1: expected True or False"),
    "logits that are overwritten": (Overwriting, "the logits that keep_going is shown"),
    "a text that is remembered": (Remembering, "in a second text"),
    "a memory that copies share": (Shared, "beside those of a copy|after"),
}


@pytest.mark.parametrize("defect", CONTROLLERS)
def test_a_planted_defect_of_a_controller_is_found_and_named(defect: str) -> None:
    build, said = CONTROLLERS[defect]
    with pytest.raises(ContractError, match=said):
        check_controller(build)


def test_the_controller_without_a_defect_passes() -> None:
    check_controller(Mine)


# --- objectives ---------------------------------------------------------------------------------


class Loss(FalconObjective):
    """Keeps all promises."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__(FalconObjectiveConfig(), context)


def losing(change: Callable[[dict[str, Tensor], LabelledRows], dict[str, Tensor]]) -> Build:
    class Losing(Loss):
        def __call__(self, rows: LabelledRows) -> dict[str, Tensor]:
            return change(super().__call__(rows), rows)

    return Losing


def each(change: Callable[[Tensor, LabelledRows], Tensor]) -> Build:
    return losing(lambda terms, rows: {n: change(term, rows) for n, term in terms.items()})


class Weightless(Loss):
    def __init__(self, context: BuildContext) -> None:
        super().__init__(context)
        self.weights = {}


def spoil(terms: dict[str, Tensor], rows: LabelledRows) -> dict[str, Tensor]:
    rows.teacher_logits.mul_(2)
    return terms


def naive(terms: dict[str, Tensor], rows: LabelledRows) -> dict[str, Tensor]:
    """A divergence by probabilities, whose logarithm is that of 0 where they are sure."""
    q, p = rows.student_logits.softmax(-1), rows.teacher_logits.softmax(-1)
    return terms | {"soft": (p * (p.log() - q.log())).sum(-1)}


OBJECTIVES: dict[str, tuple[Build, str]] = {
    "no weights": (Weightless, "weights: expected a mapping"),
    "a term without a weight": (
        losing(lambda terms, rows: terms | {"more": terms["soft"]}),
        "the names of its terms",
    ),
    "a mean over rows": (each(lambda term, _: term.mean()), r"the shape of the term"),
    "a mean over rows, spread": (
        each(lambda term, _: term.mean().expand(term.shape) if len(term) else term),
        "in parts of 5 rows",
    ),
    "a mean that is taken away": (
        each(lambda term, _: term - term.mean() if len(term) else term),
        "in parts of 5 rows",
    ),
    "numbers from nowhere": (
        each(lambda term, _: term + torch.rand(term.shape)),
        "with the same generator",
    ),
    "as many draws as parts": (
        each(lambda term, rows: term + torch.rand((), generator=rows.generator)),
        "in parts of 5 rows",
    ),
    "terms that are detached": (each(lambda term, _: term.detach()), "the loss"),
    "a gradient of nothing": (each(lambda term, _: 0 * term), "not all 0"),
    "rows that are overwritten": (losing(spoil), "teacher_logits changed in place|same generator"),
    "the logarithm of nothing": (losing(naive), "the term 'soft': expected numbers"),
    "the root of nothing": (
        each(lambda term, _: term + (term - term.detach()).abs().sqrt()),
        "gradients",
    ),
}


@pytest.mark.parametrize("defect", OBJECTIVES)
def test_a_planted_defect_of_an_objective_is_found_and_named(defect: str) -> None:
    build, said = OBJECTIVES[defect]
    with pytest.raises(ContractError, match=said):
        check_objective(build)
