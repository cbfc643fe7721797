"""Texts and fits of the harness, and biases that they must find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from falcon_lab.acceptance import Auto
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.interfaces import BuildContext
from falcon_lab.sampling import Sampling
from falcon_lab.testing import (
    TREES,
    ContractError,
    accepted,
    build_drafter,
    engine,
    fit,
    lossless_rounds,
    plain_text,
    tiny_target,
    write,
    write_together,
)
from falcon_lab.testing.decoding import exact
from falcon_lab.trees.template_tree import Chain

HOST: Any = None
TARGET = tiny_target(vocab=6)
NODE = {"name": "falcon", "block": 2}
SAMPLED = {"name": "chain", "depth": 3, "proposal": "sampled"}
PROMPTS = ([5], [3, 1, 4, 1, 5])


class Careless(Auto):
    """Takes every chain that the drafter gives."""

    def __call__(self, tree: Any, *given: Any) -> Any:
        found = super().__call__(tree, *given)
        path = torch.arange(min(2, tree.nodes)) if tree.nodes > 1 else found.path
        return type(found)(path, found.next_token)


def by(rule: Any = None, tree: Any = None) -> SpeculativeEngine:
    made = build_drafter(TARGET, NODE, stir=0.1)
    return engine(TARGET, made, tree=tree or TREES["a chain"], rule=rule)


def careless() -> Careless:
    return Careless(None, BuildContext(HOST))


def test_an_engine_takes_nodes_and_objects_and_has_defaults() -> None:
    drafter = build_drafter(TARGET, NODE)
    assert isinstance(engine(TARGET, drafter).tree_builder, Chain)
    rule, context = careless(), BuildContext(TARGET, 2)
    tree = engine(TARGET, drafter, tree={"name": "chain", "depth": 7}).tree_builder
    assert tree.max_nodes == 8
    made = engine(TARGET, drafter, tree=tree, rule=rule, chunk=3)
    assert (made.tree_builder, made.rule, made.decoding.prefill_chunk) == (tree, rule, 3)
    assert context.block == drafter.block


def test_a_drafter_has_the_same_weights_every_time() -> None:
    plain, again, other, stirred = (
        build_drafter(TARGET, NODE, **options).state_dict()
        for options in ({}, {}, {"seed": 1}, {"stir": 0.1})
    )
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)
    assert all(not torch.equal(plain[name], stirred[name]) for name in plain)


def test_rounds_come_from_texts_that_are_the_targets() -> None:
    rounds = lossless_rounds(by(), PROMPTS, 20)
    assert sum(done.emitted for done in rounds) == len(PROMPTS) * 19
    assert accepted(rounds) == sum(done.accepted for done in rounds) > 0
    with pytest.raises(ContractError, match=r"the text after \[5\]: expected the target's own"):
        lossless_rounds(by(careless()), PROMPTS, 20)


def test_texts_side_by_side_are_texts_alone() -> None:
    found = write_together(by(), PROMPTS, 10)
    assert [one.tokens for one in found] == [write(by(), prompt, 10).tokens for prompt in PROMPTS]
    assert [one.tokens for one in found] == [plain_text(TARGET, prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_the_exact_distribution_is_what_single_passes_give(tokens: int) -> None:
    sampling = Sampling(temperature=0.9, top_k=3)
    joint = exact(TARGET, [3, 1], sampling, tokens)
    assert joint.shape == (6,) * tokens
    text = torch.randint(6, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()
    text[0] = int(joint.flatten(1).sum(-1).argmax())
    chance = 1.0
    for place, token in enumerate(text):
        known = torch.tensor([3, 1, *text[:place]])
        logits = TARGET.prefill(known, TARGET.new_cache(len(known))).logits[-1]
        chance *= float(sampling.probabilities(logits)[token])
    assert float(joint[tuple(text)]) == pytest.approx(chance, rel=1e-4, abs=1e-9)
    assert float(joint.sum()) == pytest.approx(1)


def test_sampled_text_fits_and_a_bias_does_not() -> None:
    settings: dict[str, Any] = {"samples": 200, "temperature": 2.0, "top_k": 3}
    chances = [
        fit(one, PROMPTS[1], generator=torch.Generator().manual_seed(1), **settings)
        for one in (by(tree=SAMPLED), by(careless(), SAMPLED))
    ]
    assert chances[0] > 0.01
    assert chances[1] < 1e-6


def test_a_fit_that_would_say_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only 0 outcomes of 3 tokens .* take more samples"):
        fit(by(), [5], samples=4, generator=torch.Generator(), temperature=1.0)
