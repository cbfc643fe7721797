from __future__ import annotations

import math

import pytest
import torch
from falcon_lab_selfspec import DraftExitConfig
from falcon_lab_selfspec.draft_exit import DraftExit
from selfspec_cases import engine, target

from falcon_lab import fields, testing
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, RoundOutcome
from falcon_lab.sampling import Sampling
from falcon_lab.testing.decoding import PROMPTS


def controller(**options: float | None) -> DraftExit:
    return DraftExit(DraftExitConfig(**options), BuildContext(target("llama")))  # type: ignore[arg-type]


def drafted(*likely: float) -> DraftOutput:
    """A pass whose likeliest tokens have these probabilities."""
    rows = [[probability, *[(1 - probability) / 200] * 200] for probability in likely]
    return DraftOutput(torch.tensor([rows]).log())


def play(one: DraftExit, drafts: int, accepted: int, *, exited: bool) -> None:
    """Make a round: drafting is asked whether to go on after every token that may have another."""
    for number in range(1, drafts):
        assert one.keep_going(number, drafted(0.99))
    if exited:
        assert not one.keep_going(drafts, drafted(0.6))
    one.update(RoundOutcome(drafts, drafts, accepted))


def test_the_threshold_follows_the_papers_rule() -> None:
    one = controller(most=4, rate_memory=0.5, threshold_memory=0.9)
    # AR = AR/2 + (accepted/drafted)/2; the new threshold is 0.9 of the old one and 0.1 of the
    # wanted one, so that it moves by a tenth of the step of 0.01.
    for (drafts, accepted, exited), rate, threshold in (
        ((2, 2, True), 0.5, 0.801),  # 0.5 < 0.9: up
        ((4, 4, False), 0.75, 0.802),
        ((4, 4, False), 0.875, 0.803),
        ((4, 4, False), 0.9375, 0.803),  # enough, and as much drafted as allowed
        ((2, 2, True), 0.96875, 0.802),  # enough, and drafting stopped of itself: down
        ((1, 0, True), 0.484375, 0.803),
        ((0, 0, False), 0.484375, 0.803),  # nothing drafted: nothing learnt
    ):
        play(one, drafts, accepted, exited=exited) if drafts else one.update(RoundOutcome(0, 0, 0))
        assert one.rate == pytest.approx(rate)
        assert one.threshold == pytest.approx(threshold)
    one.reset()
    assert (one.threshold, one.rate) == (0.8, 0.0)


def test_a_memory_of_nothing_moves_by_whole_steps() -> None:
    one = controller(
        threshold=0.3, target_rate=0.5, step=0.25, rate_memory=0.0, threshold_memory=0.0
    )
    for (drafts, accepted), threshold in (((4, 1), 0.55), ((2, 1), 0.3), ((3, 3), 0.05)):
        assert one.keep_going(1, drafted(0.9))
        assert not one.keep_going(2, drafted(0.02))
        one.update(RoundOutcome(drafts, drafts, accepted))
        assert one.threshold == pytest.approx(threshold)


def test_drafting_stops_behind_a_token_below_the_threshold() -> None:
    one = controller(threshold=0.7)
    assert one.keep_going(1, drafted(0.71))
    assert not one.keep_going(2, drafted(0.69))
    assert not one.keep_going(1, drafted(0.9, 0.6))  # a block: the least likely of its tokens
    assert one.budget() == Budget(depth=12)


def test_the_first_threshold_depends_on_how_tokens_are_drawn() -> None:
    for temperature, threshold in ((0.0, 0.8), (1.0, 0.5), (0.0, 0.8)):
        one = controller()
        one.begin_sequence(Sampling(temperature))
        one.reset()
        assert one.threshold == threshold
    one = controller(threshold=0.1)
    one.begin_sequence(Sampling(1.0))
    one.reset()
    assert one.threshold == 0.1


def test_decoding_tells_it_the_way_of_drawing_and_keeps_the_unlikely_token() -> None:
    one = controller(step=0.0)
    chain = {"name": "chain", "depth": 6}
    rounds = testing.lossless_rounds(engine(tree=chain, controller=one, layers=2), PROMPTS, 24)
    assert one.threshold == 0.8
    assert all(done.depth >= 1 for done in rounds[:3])
    assert min(done.depth for done in rounds) < 6
    testing.write(engine(tree=chain, controller=one, layers=2), PROMPTS[1], 4, temperature=1.0)
    assert math.isclose(one.threshold, 0.5)


@pytest.mark.parametrize(
    "options", [{"threshold": 1.5}, {"most": 0}, {"target_rate": -1}, {"step": "a"}], ids=str
)
def test_numbers_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"controller.{next(iter(options))}"):
        fields.options(DraftExitConfig, options, "controller")
