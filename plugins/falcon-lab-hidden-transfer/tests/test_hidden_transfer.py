from __future__ import annotations

from typing import Any

import pytest
import torch
from transfer_cases import FAMILIES, FOLDER, KNOWN, drafter, engine, target

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Frontier, Reveal
from falcon_lab.testing import fit, packed, training_inputs
from falcon_lab.tree import TokenTree

PROMPTS = [[5], [3, 1, 4, 1, 5, 9]]
TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 3},
    {"name": "static", "template": {"": 3, "0": 2, "1": 1, "00": 2}},
    {"name": "dynamic", "nodes": 8},
]


def test_the_distribution_is_as_users_expect_one() -> None:
    testing.check_distribution(FOLDER)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, tree: dict[str, Any]) -> None:
    model = target(family)
    rounds = testing.lossless_rounds(engine(model, drafter(model), tree=tree), PROMPTS, 24)
    assert rounds[0].nodes == 0
    assert any(one.nodes for one in rounds)
    assert any(one.auxiliary for one in rounds)


def test_batches_are_lossless() -> None:
    model = target("gemma3")
    plain = [testing.plain_text(model, prompt, 20) for prompt in PROMPTS * 2]
    together = testing.write_together(
        engine(model, drafter(model), tree=TREES[1]), PROMPTS * 2, 20, batch_size=3
    )
    assert [one.tokens for one in together] == plain


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_sampled_output_follows_the_target_s_distribution(proposal: str) -> None:
    model = testing.tiny_target(vocab=5, layers=3)
    tree = {"name": "static", "template": {"": 3, "0": 2}, "proposal": proposal}
    by = engine(model, drafter(model), tree=tree)
    generator = torch.Generator().manual_seed(5)
    assert fit(by, [3, 1, 4], samples=400, generator=generator, temperature=0.9) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_guesses_what_training_predicts(family: str) -> None:
    """Behind every node of every verified tree, by the maps that are trained."""
    model = target(family)
    made = drafter(model, block=2)
    text, compared = list(PROMPTS[1]), 0

    def check(added: list[int], accepted: int, tree: TokenTree | None, _: object) -> None:
        nonlocal compared
        text.extend(added)
        drafted = made.draft(Frontier.root(torch.device("cpu"))).logits[0]
        if tree is None or not len(drafted):
            return
        rows = training_inputs(model, made, packed([[torch.tensor([*text, 1])]]), torch.Generator())
        with torch.no_grad():
            trained = made(rows)
        # The newest token is not read yet: the guesses stand behind the one before it.
        at = (trained.source[0] == len(text) - 2).nonzero().flatten()
        expected = model.head(trained.features[0, at])[: len(drafted)]
        torch.testing.assert_close(drafted, expected, rtol=1e-3, atol=1e-3)
        compared += 1

    testing.write(engine(model, made, tree=TREES[1]), PROMPTS[1], 16, on_round=check)
    assert compared > 3


def test_a_prediction_depends_on_nothing_behind_its_source() -> None:
    model = target()
    made = drafter(model, block=2, rows=6)
    draws = torch.Generator().manual_seed(6)
    first, other = (torch.randint(1, 12, (1, 12), generator=draws) for _ in range(2))
    other[:, :7] = first[:, :7]
    found = []
    for tokens in (first, other):
        rows = training_inputs(model, made, packed([[tokens[0]]]), torch.Generator().manual_seed(4))
        with torch.no_grad():
            found.append(made(rows))
    early = found[0].source[0] <= 6
    assert early.any()
    assert not early.all()
    for part in ("source", "label", "slot", "group"):
        assert torch.equal(getattr(found[0], part), getattr(found[1], part))
    assert found[0].source.unique().numel() == 6
    same = torch.isclose(found[0].features, found[1].features, atol=1e-5).all(-1)[0]
    assert same[early].all()
    assert not same[~early].any()


def test_from_distillation_to_decoding() -> None:
    """Maps that have learnt a target's own texts draft better than the identity."""
    model = testing.tiny_target(vocab=16, layers=4)
    made, texts = drafter(model, stir=0, block=2, layer=2), testing.own_texts(model)
    objective = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.0}
    module = testing.distillation(
        model, made, objective=objective, components=KNOWN, steps=80, lr=1e-2, noise=0.0
    )
    before, after = testing.distil(module, texts)
    assert after["val/loss"] < 0.9 * before["val/loss"]
    prompts = texts[:, :2].tolist()
    rounds = testing.lossless_rounds(engine(model, made, tree=TREES[0]), prompts, 20)
    assert testing.accepted(rounds) / len(rounds) > 0.3


def test_what_cannot_be_is_refused() -> None:
    model = target()
    with pytest.raises(FalconLabError, match="layers 0 to 2"):
        drafter(model, layer=3)
    made = drafter(model)
    rows = training_inputs(model, made, packed([[torch.arange(1, 9)]]), torch.Generator())
    nothing = torch.zeros(1, 1)
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        made(rows, Reveal(nothing.bool(), nothing.long(), nothing))
    assert made.draft(Frontier.root(torch.device("cpu"))).logits.shape == (1, 0, 12)
