"""Replayed and looked-at rounds are those of the engine, count for count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.auxiliary import WithAuxiliary
from fakes.decoding import CONTEXT, chain, generate, speculative
from fakes.drafters import SilentDrafter
from fakes.itself import TargetItself
from fakes.trees import grown
from falcon_lab.config.schema import DecodingConfig, EvaluationConfig, Experiment, MethodConfig
from falcon_lab.controllers import Confidence
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.measure.engines import Methods
from falcon_lab.plugins.builtins import ConfidenceConfig, DynamicTreeConfig, FalconConfig
from falcon_lab.studies.tune.costs import Costs
from falcon_lab.studies.tune.replay import DraftingPolicy, odds, table, trace
from falcon_lab.studies.tune.search import expected
from falcon_lab.studies.tune.stage import estimates_of
from falcon_lab.studies.tune.texts import Text, replay, write_texts
from falcon_lab.trees.best_first import DynamicTree
from falcon_lab.trees.paths import Path
from tiny_models import tiny_target

TOKENS = 24
PROMPTS = ([7, 9, 4], [12, 3, 3, 20, 8], [30])
ROW = MethodConfig()
FREE = Costs(verify=[(0, 1.0)], first=0, later=0, block=0, asking=0, fixed=0, step=1)


@cache
def target() -> Any:
    return tiny_target()


@cache
def texts() -> list[Text]:
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    return write_texts(target(), prompts, TOKENS, StopCondition(), DecodingConfig())


@cache
def drafter(block: int, noise: float = 1.5) -> TargetItself:
    return TargetItself(target(), block, noise)


@cache
def falcon(block: int) -> FalconDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        built = FalconDrafter(FalconConfig(block=block), BuildContext(target()))
    return built.eval()


def controller(threshold: float | None) -> Any:
    if threshold is None:
        return None
    return Confidence(ConfidenceConfig(threshold=threshold), CONTEXT)


def decoded(drafter: Any, tree: Any, threshold: float | None = None) -> list[list[Any]]:
    """The engine's rounds of every prompt."""
    engine = speculative(target(), drafter, tree, controller=controller(threshold))
    return [generate(engine, prompt, TOKENS).rounds for prompt in PROMPTS]


def replayed(drafter: Any, tree: Any, threshold: float | None = None) -> list[list[Any]]:
    engine = speculative(target(), drafter, tree, controller=controller(threshold))
    return [list(replay(t, drafter, engine.tree_builder, engine.controller)) for t in texts()]


def looked(
    drafter: Any, tree: Sequence[Path], threshold: float | None = None, skip: int = 0
) -> list[Any]:
    log = -math.inf if threshold is None else math.log(threshold)
    policy = DraftingPolicy(frozenset(tree), log)
    return [trace(t, drafter, policy, depth=8, lowest=math.log(0.01), skip=skip) for t in texts()]


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 99), max_size=10),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 0.02, 0.3]),
)
def test_a_replay_has_the_engines_rounds(
    choices: list[int], block: int, threshold: float | None
) -> None:
    tree = grown(choices, deep=7)
    real = decoded(drafter(block), tree, threshold)
    found = replayed(drafter(block), tree, threshold)
    assert [[(r.nodes, len(r.blocks), r.emitted) for r in of] for of in found] == [
        [(r.nodes, r.passes, r.emitted) for r in of] for of in real
    ]


@pytest.mark.parametrize("block", [1, 2, 3])
def test_a_replay_of_the_falcon_drafter_has_the_engines_rounds(block: int) -> None:
    tree = sorted({(r,) for r in range(30)} | set(chain(5)), key=lambda p: (len(p), p))
    real, found = decoded(falcon(block), tree), replayed(falcon(block), tree)
    assert [[r.emitted for r in of] for of in found] == [[r.emitted for r in of] for of in real]
    assert any(r.emitted > 1 for of in found for r in of)


def test_a_replay_of_a_growing_tree_has_the_engines_rounds() -> None:
    builder = DynamicTree(
        DynamicTreeConfig(nodes=7, beam=3, width=3, depth=6), BuildContext(target(), 2)
    )
    real, found = decoded(drafter(2), builder), replayed(drafter(2), builder)
    assert [[(r.nodes, len(r.blocks), r.emitted) for r in of] for of in found] == [
        [(r.nodes, r.passes, r.emitted) for r in of] for of in real
    ]
    assert any(f > 1 for of in found for r in of for f in r.blocks)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 99), max_size=10),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 0.02, 0.3]),
)
def test_the_tau_of_a_tree_on_its_own_rounds_is_the_engines(
    choices: list[int], block: int, threshold: float | None
) -> None:
    tree = grown(choices, deep=7)
    real = [r for of in decoded(drafter(block), tree, threshold) for r in of]
    traces = [found for of in looked(drafter(block), tree, threshold) for found in of]
    assert len(traces) == len(real)
    passes = -(-max(map(len, tree), default=0) // block)
    log = -math.inf if threshold is None else math.log(threshold)
    chances = odds(traces, block, passes, log)
    tokens = expected(tree, chances, FREE, block).tokens * len(traces)
    assert tokens == pytest.approx(sum(r.emitted for r in real), abs=1e-6)
    made = sum(chances.passes[1:]) * len(traces) if tree else 0
    limited = sum(found.limit == 0 for found in traces) if tree else 0  # nothing was drafted then
    assert made - limited == pytest.approx(sum(r.passes for r in real), abs=1e-6)


def test_the_tau_of_a_wide_tree_of_the_falcon_drafter_is_the_engines() -> None:
    tree = [(r,) for r in range(40)] + [(r, s) for r in range(40) for s in range(3)]
    real = [r for of in decoded(falcon(2), tree) for r in of]
    traces = [found for of in looked(falcon(2), tree) for found in of]
    chances = odds(traces, 2, 1, -math.inf)
    assert len(traces) == len(real)
    assert expected(tree, chances, FREE, 2).tokens * len(traces) == pytest.approx(
        sum(r.emitted for r in real)
    )
    assert sum(r.accepted for r in real) > 0


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_drafter_that_is_the_target_is_always_right(block: int) -> None:
    traces = [found for of in looked(drafter(block, 0.0), chain(4)) for found in of]
    for row in table(traces, 3):
        assert (row.ranks, row.beyond) == ([1.0, 0.0, 0.0], 0.0)
    chances = odds(traces, block, 8 // block, -math.inf)
    assert set(chances.gain) == set(chain(8))


def test_skipping_tokens_looks_at_other_rounds_of_the_same_text() -> None:
    whole, later = (looked(drafter(2), chain(2), skip=skip) for skip in (0, 3))
    assert [of[0].limit - 3 for of in whole] == [of[0].limit for of in later]
    assert [of[-1].known for of in later] == [of[-1].known for of in whole]


def test_a_text_that_was_ended_is_known_up_to_its_end() -> None:
    answer = texts()[0].tokens[3:].tolist()
    end = next(token for at, token in enumerate(answer) if at > 5 and token not in answer[:at])
    stop = StopCondition([end])
    [text] = write_texts(target(), [torch.tensor(PROMPTS[0])], TOKENS, stop, DecodingConfig())
    assert text.tokens[-1] == end
    assert text.limit == TOKENS > text.answer
    engine = speculative(target(), drafter(2), chain(4))
    real = generate(engine, PROMPTS[0], TOKENS, stop=stop).rounds
    found = list(replay(text, drafter(2), engine.tree_builder, engine.controller))
    assert [(r.nodes, r.emitted) for r in found] == [(r.nodes, r.emitted) for r in real]
    traces = trace(text, drafter(2), DraftingPolicy(chain(4)), depth=4, lowest=-math.inf)
    assert len(traces) == len(real)


def test_a_drafter_with_nothing_to_say_is_never_right() -> None:
    silent = SilentDrafter(64, 2)
    traces = [found for of in looked(silent, chain(4)) for found in of]
    assert all(found.ranks == () for found in traces)
    assert len(traces) == sum(text.answer - 1 for text in texts())
    assert all(r.emitted == 1 for of in replayed(silent, chain(4)) for r in of)


class Observing(WithAuxiliary, SilentDrafter):
    """Depends on what the target predicts at its auxiliary nodes."""


def test_a_drafter_with_auxiliary_nodes_is_not_replayed_and_promises_nothing() -> None:
    asking = Observing(64, 1).with_nodes(3)
    engines = {
        "asking": speculative(target(), asking, chain(2)),
        "silent": speculative(target(), SilentDrafter(64, 1), chain(2)),
    }
    experiment = Experiment(evaluation=EvaluationConfig(methods=dict.fromkeys(engines, ROW)))
    found = estimates_of(experiment, Methods(engines), texts(), FREE)
    assert list(found) == ["silent"]
