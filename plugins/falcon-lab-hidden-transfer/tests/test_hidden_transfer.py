from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transfer_cases import FAMILIES, FOLDER, KNOWN, drafter, engine, target

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Frontier, Reveal
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


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_read_behind_a_node_than_the_trees_are_deep(depth: int) -> None:
    model, tree = target(), {"name": "chain", "depth": depth}
    short, whole = drafter(model, block=3), drafter(model, block=3)
    whole.reserve, whole.most_auxiliary = lambda *_: None, lambda tree: 64
    narrow, wide = (
        testing.lossless_rounds(engine(model, made, tree=tree), PROMPTS, 24)
        for made in (short, whole)
    )
    assert max(one.auxiliary for one in narrow) == (depth + 1) * depth
    assert [(one.nodes, one.accepted) for one in narrow[:-2]] == [
        (one.nodes, one.accepted) for one in wide[:-2]
    ]


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


def linear_states(made: Any, *, outliers: float = 0.0) -> tuple[DrafterInputs, Tensor]:
    """Documents whose states follow by a map from the one before, and that map.

    The first states of some documents are longer, and what follows them has nothing to do with it.
    """
    draws = torch.Generator().manual_seed(7)
    wide, documents, length = made.host.hidden_size, 60, 12
    rule = torch.linalg.qr(torch.randn(wide, wide, generator=draws)).Q
    states = torch.randn(documents, length, wide, generator=draws)
    for place in range(1, length):
        states[:, place] = states[:, place - 1] @ rule.T
    if outliers:
        states[:, 0] = outliers * torch.randn(documents, wide, generator=draws)
    # Two documents a sequence, and padding of which nothing follows.
    packed_states = states.view(documents // 2, 2 * length, 1, wide)
    padding = torch.randn(documents // 2, 4, 1, wide, generator=draws)
    number = torch.arange(documents).repeat_interleave(length).view(documents // 2, -1)
    number = torch.cat([number, torch.full((documents // 2, 4), -1)], 1)
    nothing = torch.zeros_like(number)
    taps = torch.cat([packed_states, padding], 1)
    given = DrafterInputs(nothing, taps[:, :, 0], number, nothing, draws, taps)
    return given, rule


def begun(made: Any, given: DrafterInputs) -> int:
    solution = made.first_weights()
    rows = len(given.tokens) // 2
    for part in (slice(0, rows), slice(rows, None)):
        inputs = replace(given, documents=given.documents[part], taps=given.taps[part])
        solution.add(inputs, given.features)
    return int(solution.assign())


def test_maps_begin_as_what_made_the_states() -> None:
    made = drafter(target(), stir=0, block=2)
    given, rule = linear_states(made)
    assert begun(made, given) == 60 * 10
    for found, expected in zip(made.maps.detach(), [rule, rule @ rule], strict=True):
        torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_first_states_that_are_far_longer_do_not_decide_what_the_maps_begin_as() -> None:
    made = drafter(target(), stir=0, block=1)
    given, rule = linear_states(made, outliers=300.0)
    begun(made, given)
    assert (made.maps[0].detach() - rule).norm() < 0.3 * rule.norm()


def test_a_training_may_begin_at_the_regression() -> None:
    """On a target's own texts it drafts better than the identity, without a step."""
    model = testing.tiny_target(vocab=16, layers=4)
    texts, options = testing.own_texts(model), {"stir": 0, "block": 2, "layer": 2}
    identity, regression = (drafter(model, **options) for _ in range(2))
    rows = training_inputs(model, regression, packed([[text] for text in texts]), torch.Generator())
    begun(regression, rows)
    objective = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.0}
    losses = []
    for made in (identity, regression):
        module = testing.distillation(
            model, made, objective=objective, components=KNOWN, steps=1, lr=1e-9, noise=0.0
        )
        losses.append(testing.distil(module, texts)[0]["val/loss"])
    assert losses[1] < 0.9 * losses[0]


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
