"""The choice on a drafter of known ability, and what a row estimates."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fakes.decoding import chain, generate, speculative
from fakes.itself import TargetItself
from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.plugins.builtins import DynamicTreeConfig
from falcon_lab.studies.tune.choosing import best_growth, choose
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.measuring import Bench
from falcon_lab.studies.tune.replay import estimate
from falcon_lab.studies.tune.texts import Text, write_texts
from falcon_lab.trees.best_first import DynamicTree
from tiny_models import tiny_target

TOKENS = 24
PROMPTS = ([7, 9, 4], [12, 3, 3, 20, 8], [30])


@cache
def target() -> Any:
    return tiny_target()


@cache
def texts() -> list[Text]:
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    return write_texts(target(), prompts, TOKENS, StopCondition(), DecodingConfig())


def costs(later: float = 0.01, node: float = 0.01, fixed: float = 0.0) -> Costs:
    line = [(0.0, 1.0), (64.0, 1.0 + 64 * node)]
    return Costs(line, first=later, later=later, block=later, asking=0, fixed=fixed, step=1.0)


def chosen(drafter: TargetItself, price: Costs, **limits: int) -> Any:
    lines: list[str] = []
    given = {"nodes": 16, "depth": 6, **limits}
    found = choose(texts(), drafter, price, chain(2), **given, announce=lines.append)
    assert lines
    return found


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_drafter_that_is_always_right_gets_the_longest_chain(block: int) -> None:
    found = chosen(TargetItself(target(), block), costs())
    assert set(found.choice.paths) == set(chain(6))


def test_where_drafting_is_dear_nothing_is_drafted() -> None:
    found = chosen(TargetItself(target(), 2), costs(later=50.0))
    assert found.choice.paths == ()


def test_a_drafter_that_is_often_wrong_gets_branches_where_nodes_are_free() -> None:
    found = chosen(TargetItself(target(), 2, noise=3.0), costs(node=0.0), depth=2)
    assert any(max(path) for path in found.choice.paths)
    assert len(found.choice.paths) <= 16
    alone = chosen(TargetItself(target(), 2, noise=3.0), costs(node=0.0), nodes=3, depth=2)
    assert len(alone.choice.paths) <= 3
    assert alone.choice.candidate.rate <= found.choice.candidate.rate


def test_a_row_promises_its_replayed_rounds_at_their_price() -> None:
    drafter, price = TargetItself(target(), 2, noise=1.5), costs(fixed=0.25)
    engine = speculative(target(), drafter, chain(4))
    found = estimate(engine, texts(), price, builder="chain", asked=False)
    rounds = [r for prompt in PROMPTS for r in generate(engine, prompt, TOKENS).rounds]
    tokens, count = sum(r.emitted for r in rounds), len(rounds)
    seconds = sum(1 + 0.01 * r.nodes + 0.01 * r.passes + 0.25 for r in rounds)
    assert found.tau == pytest.approx(tokens / count)
    assert found.nodes == pytest.approx(sum(r.nodes for r in rounds) / count)
    assert found.passes == pytest.approx(sum(r.passes for r in rounds) / count)
    assert found.milliseconds == pytest.approx(1000 * seconds / count)
    assert found.rate == pytest.approx(tokens / seconds)
    assert found.speedup.ratio == pytest.approx(tokens / seconds)  # a step of plain costs 1
    assert found.tokens_per_second == pytest.approx((tokens + len(PROMPTS)) / seconds)


def test_a_dynamic_tree_is_grown_as_far_as_it_pays() -> None:
    engine = speculative(target(), TargetItself(target(), 2, noise=2.0), chain(4))
    bench = Bench(engine, StopCondition())
    dear = best_growth(bench, texts(), costs(node=0.5), nodes=12, depth=6)
    assert dear.tree.nodes == 6
    small = best_growth(bench, texts(), costs(), nodes=2, depth=6)
    assert small.tree.nodes == 2
    price = costs(node=0.001)
    best = best_growth(bench, texts(), price, nodes=12, depth=6)
    for nodes in (6, 8, 10):
        tree = DynamicTree(DynamicTreeConfig(nodes=nodes, beam=2, depth=6), bench.context)
        other = estimate(bench.engine(tree), texts(), price, builder="dynamic", asked=False)
        assert best.estimate.rate >= other.rate
