"""Costs: what explains measured rounds, and what a round of any tree is then said to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.decoding import chain, speculative
from fakes.itself import TargetItself
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.generation import Generation, Round, Seconds
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.builtins import DynamicTreeConfig
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.measuring import (
    TOKENS,
    Bench,
    Sample,
    curve,
    doubling,
    fitted,
    measure_costs,
    middle,
    shapes,
)
from falcon_lab.studies.tune.texts import ReplayedRound, Text, write_texts
from falcon_lab.trees.best_first import DynamicTree
from falcon_lab.trees.layout import build_layout
from falcon_lab.trees.paths import checked
from tiny_models import tiny_target

TRUE = Costs(
    verify=[(0.0, 4.0), (1.0, 5.0), (64.0, 15.0)],
    first=1.0,
    later=0.8,
    block=0.25,
    asking=0.05,
    fixed=0.5,
    step=4.5,
    prefill=20.0,
    plain_prefill=15.0,
    builders={"dynamic": 0.3},
)


def sample(nodes: float, later: float, extra: float, more: float = 0.0) -> Sample:
    draft = TRUE.first + later * (TRUE.later + more) + extra * TRUE.block + more
    return Sample(nodes, later, extra, TRUE.verifying(nodes), draft, TRUE.fixed, TRUE.prefill)


def plain() -> Generation:
    seconds = Seconds(prefill=15.0, verify=8.0, total=9.0)
    return Generation([1, 2, 3], "length", [Round(0, 0, 0, 0, 1)] * 2, seconds)


def measured() -> dict[str, Sample]:
    found = {}
    for name, paths in shapes(2, 64, 512).items():
        layout = build_layout(checked(paths), 2)
        blocks = [len(p.stands) for p in layout.passes]
        found[name] = sample(len(paths), len(blocks) - 1, sum(f - 1 for f in blocks[1:]))
    return found


def test_the_fit_finds_the_costs_that_made_the_rounds() -> None:
    grown = sample(8.0, 2.0, 1.5, more=TRUE.builders["dynamic"])
    found = fitted({**measured(), "dynamic": grown}, [plain()], TRUE.asking, {"dynamic"})
    for name in ("first", "later", "block", "fixed", "step", "prefill", "plain_prefill", "asking"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name)), name
    assert found.builders == {"dynamic": pytest.approx(TRUE.builders["dynamic"])}
    for nodes in (0, 1, 3, 10, 40, 64):
        assert found.verifying(nodes) == pytest.approx(TRUE.verifying(nodes))


@pytest.mark.parametrize("block", [1, 2, 3])
def test_the_shapes_tell_nodes_passes_and_blocks_apart(block: int) -> None:
    counted = []
    for paths in shapes(block, 16, 512).values():
        layout = build_layout(checked(paths), block)  # refuses what is no tree
        counted.append(tuple(len(p.stands) for p in layout.passes))
    for blocks in [(1,), (1, 1), (1, 1, 1, 1), (1, 2), (1, 4), (1, 8)]:
        assert blocks in counted


def test_no_shape_asks_for_more_children_than_there_are_tokens() -> None:
    ranks = [max(p[-1] for p in paths) for paths in shapes(2, 64, 5).values()]
    assert max(ranks) == 4


def test_widths_double_and_end_with_the_most() -> None:
    assert doubling(64) == [1, 2, 4, 8, 16, 32, 64]
    assert doubling(12) == [1, 2, 4, 8, 12]
    assert doubling(1) == [1]


@given(st.floats(0, 200), st.floats(0, 200))
def test_a_target_pass_costs_what_lies_between_the_measured_ones(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert TRUE.verifying(low) <= TRUE.verifying(high) + 1e-12
    for nodes, seconds in TRUE.verify:
        assert TRUE.verifying(nodes) == pytest.approx(seconds)
    assert TRUE.verifying(127) == pytest.approx(25.0)  # the last line goes on


def test_a_round_costs_its_nodes_its_passes_and_the_rest() -> None:
    done = ReplayedRound(nodes=1, blocks=(1, 3), emitted=2)
    assert TRUE.round(done) == pytest.approx(5 + 1 + 0.8 + 2 * 0.25 + 0.5)
    assert TRUE.round(done, builder="dynamic") == pytest.approx(TRUE.round(done) + 0.6)
    assert TRUE.round(done, asked=True) == pytest.approx(TRUE.round(done) + 0.1)
    assert TRUE.round(ReplayedRound(0, (), 1)) == pytest.approx(4.5)


def test_points_of_one_place_are_one() -> None:
    assert curve([(8.0, 4.0), (1.0, 1.0), (8.2, 6.0), (8.4, 8.0)]) == [
        (1.0, 1.0),
        (pytest.approx(8.2), 6.0),
    ]


def text(answer: int) -> Text:
    tokens = torch.arange(5 + answer)
    return Text(tokens, torch.zeros(4 + answer, 3), 5, answer)


def test_a_text_is_gone_on_from_the_middle_of_its_answer() -> None:
    part = middle(text(30))
    assert (part.prompt, part.limit, part.tokens.tolist()) == (20, 15, list(range(35)))
    assert part.features.shape[0] == 34
    assert middle(text(400)).limit == TOKENS


def test_real_rounds_are_measured_and_every_cost_is_there() -> None:
    target = tiny_target()
    prompts = [torch.tensor([5, 9, 2]), torch.tensor([7, 7, 30])]
    texts = write_texts(target, prompts, 40, StopCondition(), DecodingConfig())
    drafter = TargetItself(target, 2)
    bench = Bench(speculative(target, drafter, chain(4)), StopCondition())
    grown = DynamicTree(DynamicTreeConfig(nodes=4, depth=4), bench.context)
    found = measure_costs(bench, texts, 8, {"dynamic": grown})
    nodes = [n for n, _ in found.verify]
    assert nodes[0] == 0
    assert nodes == sorted(set(nodes))
    assert 8 <= nodes[-1] <= 24
    assert all(seconds > 0 for _, seconds in found.verify)
    for name in ("first", "fixed", "step", "prefill", "plain_prefill", "asking"):
        assert getattr(found, name) > 0, name
    assert set(found.builders) == {"dynamic"}


def test_texts_that_are_too_short_to_be_measured_on_are_refused() -> None:
    nothing: Any = None
    with pytest.raises(FalconLabError, match="two texts of more than 16 tokens are needed"):
        measure_costs(nothing, [text(10), text(30)], 8, {})


def test_noise_makes_no_pass_cheaper_than_nothing() -> None:
    noisy = {name: replace(s, draft=2.0 - 0.1 * s.later) for name, s in measured().items()}
    found = fitted(noisy, [plain()], 0.0, set())
    assert found.later == 0.0
    assert found.block >= 0.0
