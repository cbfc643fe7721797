"""Drafting through a compiled pass and through a graph, which stand-ins take the place of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from medusa_cases import FAMILIES, drafter, engine, target

from falcon_lab.interfaces import Frontier, Observation
from falcon_lab.testing import plain_text, write, write_together
from falcon_lab.testing.compiling import Pretend, Repeating, traced

OPTIONS: list[dict[str, Any]] = [{}, {"head": "shared", "block": 3, "draft_vocabulary": 7}]
TREES: list[dict[str, Any]] = [{"name": "chain", "depth": 3}, {"name": "optimal", "nodes": 12}]


def quiet(line: str) -> None:
    """Drop the line."""


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_heads_say_what_the_modules_say(family: str, options: dict[str, Any]) -> None:
    model, compiler, recorder = target(family), Pretend(), Repeating()
    made = drafter(model, **options)
    fast = [made.compiled(quiet, compiler), made.compiled(quiet, recorder=recorder)]
    fast.append(made.compiled(quiet, traced))
    assert [one.is_compiled for one in (made, *fast)] == [False, True, True, True]
    for one in fast:
        one.prepare(5)
    tokens, features = torch.tensor([5, 3]), torch.randn(6, 2, model.hidden_size)
    for seen in features:
        outputs = []
        for one in (made, *fast):
            one.observe(Observation(tokens, seen))
            outputs.append(one.draft(Frontier.root(tokens.device)))
        for output in outputs[1:]:
            assert torch.allclose(output.logits, outputs[0].logits, atol=1e-5)
            assert torch.allclose(output.features, outputs[0].features, atol=1e-5)
    assert (compiler.names, compiler.calls, recorder.replays) == (["drafter"], 6, 6)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_with_everything_compiled_is_the_target_s(
    family: str, tree: dict[str, Any]
) -> None:
    model, compiler = target(family), Pretend()
    fast = engine(
        model.compiled(quiet, compiler), drafter(model).compiled(quiet, compiler), tree=tree
    )
    for prompt in ([5], [3, 1, 4, 1, 5, 9]):
        assert write(fast, prompt, 24).tokens == plain_text(model, prompt, 24)
    assert {name.partition("-")[0] for name in compiler.names} == {"drafter", "target"}


def test_the_rows_of_a_batch_share_what_is_compiled() -> None:
    model, compiler = target(), Pretend()
    fast = engine(model, drafter(model).compiled(quiet, compiler), tree=TREES[0])
    prompts = [[5], [3, 1, 4], [2, 2]]
    found = [text.tokens for text in write_together(fast, prompts, 12)]
    assert found == [plain_text(model, prompt, 12) for prompt in prompts]
    assert compiler.names == ["drafter"]
