"""How often the host waits for the device in a round: once, for the tokens that are written."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from fakes.decoding import CONTEXT, chain, generate, plain, speculative
from fakes.recording import Repeating
from fakes.waits import watched
from falcon_lab.acceptance import Greedy
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import Acceptance, AcceptanceRule, BuildContext
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.trees.templates import named
from tiny_models import tiny_target

PROMPT, NEW = [3, 1, 4, 1, 5, 9, 2, 6], 40


def waits(engine: Any) -> list[list[str]]:
    """Of each round but the first and the last ones, whose shapes come up once."""
    marks: list[int] = []
    with watched() as seen:
        out = generate(engine, PROMPT, NEW, on_round=lambda *_: marks.append(len(seen)))
    deep = max(round_.depth for round_ in out.rounds)
    rounds = [seen[a:b] for a, b in pairwise(marks)]
    found = [seen for seen, done in zip(rounds, out.rounds, strict=True) if done.depth == deep]
    assert len(found) > 8
    return found[1:]


def falcon(target: Any, block: int = 2) -> FalconDrafter:
    torch.manual_seed(0)
    return FalconDrafter(FalconConfig(block=block), BuildContext(host=target)).eval()


@pytest.mark.parametrize("tree", ["chain", "k2-8", "vicuna"])
def test_a_greedy_round_with_a_static_tree_waits_once(tree: str) -> None:
    target = tiny_target()
    paths = chain(4) if tree == "chain" else named(tree, 2)
    for seen in waits(speculative(target, falcon(target), paths)):
        assert seen == ["tolist"]


def test_it_waits_once_with_graphs() -> None:
    target = tiny_target().compiled(print, recorder=Repeating())
    drafter = falcon(target).compiled(print, recorder=Repeating())
    for seen in waits(speculative(target, drafter, named("k2-8", 2))):
        assert seen == ["tolist"]


def test_plain_decoding_waits_once_a_token() -> None:
    marks: list[int] = []
    with watched() as seen:
        plain(tiny_target(), PROMPT, NEW, on_round=lambda *_: marks.append(len(seen)))
    assert {tuple(seen[a:b]) for a, b in pairwise(marks[1:])} == {("tolist",)}


def test_a_decision_written_anew_is_the_one_that_counts() -> None:
    class Timid(Greedy):
        """Accepts nothing."""

        lossless = False

        def __call__(self, *arguments: Any) -> Acceptance:
            accepted = super().__call__(*arguments)
            best = arguments[1].argmax(-1)
            return Acceptance(accepted.path[:1], best[0])

    class Other(Timid):
        def accept_padded(self, *arguments: Any) -> None:
            return None

    assert Timid.accept_padded is AcceptanceRule.accept_padded
    target = tiny_target()
    for rule in (Timid(None, CONTEXT), Other(None, CONTEXT)):
        engine = speculative(target, falcon(target), chain(4), rule=rule)
        out = generate(engine, PROMPT, NEW)
        assert {round_.accepted for round_ in out.rounds} == {0}
        assert out.tokens == plain(target, PROMPT, NEW).tokens
