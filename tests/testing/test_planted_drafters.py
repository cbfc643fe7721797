"""Every promise of a drafter, broken by one that breaks it alone, is found by the check."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from falcon_lab.interfaces import (
    BuildContext,
    DrafterInputs,
    DraftOutput,
    Frontier,
    Observation,
    Prediction,
)
from falcon_lab.testing import ContractError, check_drafter
from generated import modules

package, module = modules("drafter")
WIDTH = 24
GRU: Any = module.Head


class Mine(GRU):
    """The generated head, which keeps all promises."""

    def __init__(self, context: Any) -> None:
        super().__init__(package.HeadConfig(width=WIDTH), context)


def changed(**parts: Callable[[Prediction], Any]) -> Callable[[Any], Any]:
    """A head whose predictions are given out with other parts."""

    class Changed(Mine):
        def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
            found: Prediction = super().forward(inputs, reveal)
            return replace(found, **{name: change(found) for name, change in parts.items()})

    return Changed


def saying(change: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
    """A head whose drafts are given out otherwise."""

    class Saying(Mine):
        def draft(self, frontier: Frontier) -> DraftOutput:
            found = change(super().draft(frontier).logits)
            return found if isinstance(found, DraftOutput) else DraftOutput(found)

    return Saying


class Leaking(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, features=inputs.features.roll(-1, 1)))


class LeakingTokens(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, tokens=inputs.tokens.roll(-1, 1)))


class NeverForgetting(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        return super().forward(replace(inputs, positions=torch.ones_like(inputs.positions)))


class MixingSequences(Mine):
    def step(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or len(tokens) > 1:
            state = state + 0.1 * (state.mean(0, keepdim=True) - state)
        return super().step(tokens, features, state)


class Unused(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.unused = nn.Linear(3, 3)


class Detached(Mine):
    def step(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        predicted, state = super().step(tokens, features, state)
        return predicted.detach(), state


class HoldingTheTarget(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.theirs = context.host.model.get_input_embeddings()


class TrainingTheTarget(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        context.host.model.get_output_embeddings().requires_grad_(True)


class NotAGradient(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        found = super().forward(inputs, reveal)
        assert found.features is not None
        root = (found.features - found.features.detach()).sum(-1, keepdim=True).abs().sqrt()
        return replace(found, features=found.features + root)


class Random(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        found = super().forward(inputs, reveal)
        assert found.features is not None
        return replace(found, features=found.features + 0.1 * torch.randn(found.features.shape))


class SeeingUnshown(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        if reveal is not None and reveal.mask.any():
            inputs = replace(inputs, tokens=reveal.tokens)
        return super().forward(inputs)


class SeeingTooMuch(Mine):
    def forward(self, inputs: DrafterInputs, reveal: Any = None) -> Prediction:
        if reveal is not None:
            inputs = replace(inputs, tokens=reveal.tokens)
        return super().forward(inputs)


class Otherwise(Mine):
    """Drafts otherwise than it was trained."""

    @torch.no_grad()
    def observe(self, observation: Observation) -> None:
        assert observation.features is not None
        super().observe(replace(observation, features=0.9 * observation.features))


class NotTruncated(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        self.known = self.known[0], self.drafted[1][:1]
        return output


class Remembering(Mine):
    def reset(self, first: Tensor) -> None:
        if not hasattr(self, "known"):
            super().reset(first)


class LastPartAlone(Mine):
    def observe(self, observation: Observation) -> None:
        if not observation.remaining:
            super().observe(observation)


class LastTokenAlone(Mine):
    """Begins anew with every observation."""

    def observe(self, observation: Observation) -> None:
        if not observation.remaining and not getattr(self, "reading", False):
            self.reset(observation.tokens[0])
        self.reading = bool(observation.remaining)
        super().observe(observation)


class MixingBranches(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        return DraftOutput(output.logits + 0.1 * output.logits.mean(0))


class Overwriting(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        frontier.tokens.fill_(1)
        return output


class OverwritingFeatures(Mine):
    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        assert observation.features is not None
        observation.features.mul_(2)


class ChangingTheTarget(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        self.host.model.get_output_embeddings().weight.mul_(1.01)
        return super().draft(frontier)


class Guessing(Mine):
    def draft(self, frontier: Frontier) -> DraftOutput:
        logits = super().draft(frontier).logits
        return DraftOutput(logits + 0.1 * torch.randn(logits.shape))


class NotSaved(Mine):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.learnt = torch.rand(WIDTH)

    def step(self, tokens: Tensor, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return super().step(tokens, features, state + self.learnt)


class Shared(Mine):
    """Keeps a text's state where all copies of a batch find it."""

    texts: ClassVar[dict[str, Any]] = {}

    @property
    def known(self) -> Any:
        return self.texts["known"]

    @known.setter
    def known(self, state: Any) -> None:
        self.texts["known"] = state


class Shrinking(Mine):
    def kv_bytes(self, positions: int, tree: Any) -> int:
        return 100 - positions

    def reserve(self, positions: int, tree: Any) -> None:
        pass


class Short(Mine):
    """Breaks down at the end of a long text."""

    def reset(self, first: Tensor) -> None:
        super().reset(first)
        self.room = [0] * 40

    def observe(self, observation: Observation) -> None:
        for _ in observation.tokens:
            self.room.pop()
        super().observe(observation)


class Miscompiled(Mine):
    """Says something else once it is compiled."""

    is_compiled = False

    def compiled(self, announce: Any, compiler: Any = None, recorder: Any = None) -> Any:
        other = copy.copy(self)
        other.is_compiled = True
        return other

    def prepare(self, longest: int) -> None:
        pass

    def draft(self, frontier: Frontier) -> DraftOutput:
        found = super().draft(frontier)
        return DraftOutput(found.logits + self.is_compiled * found.logits.sin())


class Narrow(Mine):
    """Keeps all promises with a draft vocabulary."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.draft_vocabulary = context.draft_vocabulary(7)

    def draft(self, frontier: Frontier) -> DraftOutput:
        super().draft(frontier)
        words = self.draft_vocabulary
        return DraftOutput(words.head(self.drafted[0])[:, None], vocabulary=words)


class OfOtherTokens(Narrow):
    """Says of other tokens than its own that it has drafted them."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        other = BuildContext(self.host).draft_vocabulary(7)
        return replace(super().draft(frontier), vocabulary=other)


class OfOtherRows(Narrow):
    """Has the rows of other tokens than it drafts."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        output = super().draft(frontier)
        return replace(output, logits=output.logits.roll(1, -1))


class WithoutBlock(Mine):
    block = 0


class NeedingMore(Mine):
    needs = frozenset({"features", "hidden"})


class NoPasses(Mine):
    max_passes = 0


BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a block of nothing": (WithoutBlock, "block=0"),
    "needs that nobody knows": (NeedingMore, "needs: expected frozenset"),
    "no passes": (NoPasses, "max_passes: expected None"),
    "no drafter": (lambda context: nn.Linear(1, 1), "without draft, observe, reset, block, needs"),
    "a vocabulary too small": (saying(lambda rows: rows[..., 1:]), r"logits in pass 1.*12\]"),
    "a draft vocabulary of other tokens": (OfOtherTokens, "DraftOutput.vocabulary in pass 1"),
    "a draft vocabulary with other rows": (OfOtherRows, "drafted and trained"),
    "too many rows": (saying(lambda rows: rows.repeat(1, 2, 1)), "at most 1"),
    "nan": (saying(lambda rows: rows / 0), "found nan or inf"),
    "a false promise": (
        saying(
            lambda rows: DraftOutput(
                rows.masked_fill(rows > rows.mean(), -torch.inf), all_proposed=True
            )
        ),
        "all_proposed",
    ),
    "features of other rows": (
        saying(lambda rows: DraftOutput(rows, rows[:, :0])),
        "DraftOutput.features",
    ),
    "a frontier that is overwritten": (Overwriting, "the frontier changed in place"),
    "an observation that is overwritten": (OverwritingFeatures, "the observation changed"),
    "a target that is changed": (ChangingTheTarget, "the target's weights changed"),
    "drafts at random": (Guessing, "drafted again"),
    "a cache that is not truncated": (NotTruncated, "rounds that drafted other tokens"),
    "parts of a prompt that are dropped": (LastPartAlone, "a prompt in parts"),
    "tokens of earlier rounds that are dropped": (LastTokenAlone, "tokens in as many rounds"),
    "a text that is remembered": (Remembering, "a second text"),
    "branches that mix": (MixingBranches, "a frontier of several"),
    "memory that falls": (Shrinking, "kv_bytes"),
    "passes that are compiled wrong": (Miscompiled, "drafts through compiled passes"),
    "labels one too far": (changed(label=lambda p: p.label + 1), "Prediction.label"),
    "sources one too old": (changed(source=lambda p: p.source - 1), "Prediction.label"),
    "slots that do not exist": (changed(slot=lambda p: p.slot + 1), "Prediction.slot"),
    "one group for all": (changed(group=lambda p: 0 * p.group), "Prediction.group"),
    "no labels": (changed(label=lambda p: 0 * p.label - 1), "rows that count"),
    "no prediction": (changed(features=lambda p: None), "Prediction: expected features"),
    "rows of another shape": (changed(slot=lambda p: p.slot[:, 1:]), "shape of Prediction.slot"),
    "numbers from nowhere": (Random, "one state of the generator"),
    "an unused weight": (Unused, "no gradient for unused.weight, unused.bias"),
    "predictions that are detached": (Detached, "a number with a gradient"),
    "the target's weights as its own": (HoldingTheTarget, "the target's as theirs.weight"),
    "a target that is trained": (TrainingTheTarget, "the frozen target"),
    "gradients that are none": (NotAGradient, "nan or inf for"),
    "labels that leak": (Leaking, "when newer inputs change"),
    "tokens that leak": (LeakingTokens, "when newer inputs change"),
    "documents that are not separate": (NeverForgetting, "packed among others"),
    "sequences that are not separate": (MixingSequences, "a batch of three"),
    "labels that are not shown": (SeeingUnshown, "labels that it does not show"),
    "a glance at nothing that shows": (SeeingTooMuch, "a glance that shows nothing"),
    "drafting that is not training": (Otherwise, "drafted and trained"),
    "something learnt that is not saved": (NotSaved, "saved and loaded"),
    "a state that copies share": (Shared, "a sequence of a batch"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_planted_defect_is_found_and_named(defect: str) -> None:
    build, said = BROKEN[defect]
    with pytest.raises(ContractError, match=said) as caught:
        check_drafter(build)
    assert "; " in str(caught.value)  # what to do about it


def test_the_head_without_a_defect_passes() -> None:
    check_drafter(Mine)


def test_what_the_drafter_itself_raises_says_what_was_being_checked() -> None:
    with pytest.raises(IndexError) as caught:
        check_drafter(Short)
    assert any("greedy text" in note for note in caught.value.__notes__)


def test_the_official_code_s_lstm_is_found_out() -> None:
    node = {"name": "falcon", "fuse": "lstm_positionwise"}  # no recurrence, so nothing to learn
    with pytest.raises(ContractError, match=r"no gradient for fuse\.mix\.weight_hh_l0"):
        check_drafter(node)


def test_every_check_has_a_defect_of_its_own() -> None:
    from falcon_lab.testing import drafter_passes, drafter_rows, drafter_training, drafters

    checks = [each.CHECKS for each in (drafter_passes, drafter_rows, drafter_training, drafters)]
    assert len(BROKEN) > len([*itertools.chain(*checks)])
