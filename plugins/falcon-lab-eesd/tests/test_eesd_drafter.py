"""Shapes: B batch, T tokens, H hidden, V vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eesd_cases import BRANCHED, CHAIN, DYNAMIC, FAMILIES, KNOWN, LAYERS, drafter, engine, target
from falcon_lab_eesd.drafter import EesdDrafter

from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Prediction, Reveal
from falcon_lab.model.target import Target
from falcon_lab.testing import (
    accepted,
    build_drafter,
    distil,
    distillation,
    fit,
    lossless_rounds,
    own_texts,
    packed,
    tiny_target,
    training_inputs,
    write,
    write_together,
)
from falcon_lab.testing.compiling import Pretend

PROMPTS = [[5, 3, 2], [7, 7, 1, 4], [2, 9]]
OBJECTIVE = {"name": "falcon", "feature": 0.0, "soft": 1.0, "hard": 0.1}


# --- lossless --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str) -> None:
    for tree in (CHAIN, BRANCHED, DYNAMIC):
        rounds = lossless_rounds(engine(family, drafter(family), tree), PROMPTS[:2], 16)
        assert accepted(rounds) > 0


def test_sampled_output_follows_the_targets_distribution() -> None:
    tree = {"name": "chain", "depth": 3, "proposal": "sampled"}
    one = engine("llama", drafter("llama"), tree)
    settings = {"samples": 200, "temperature": 1.5, "top_k": 3}
    assert fit(one, [3, 1, 4], generator=torch.Generator().manual_seed(5), **settings) > 0.01


@pytest.mark.parametrize("tree", [CHAIN, DYNAMIC], ids=["chain", "dynamic"])
def test_a_row_of_a_batch_is_drafted_for_as_if_alone(tree: dict[str, Any]) -> None:
    one = engine("gemma3", drafter("gemma3"), tree)
    together = write_together(one, PROMPTS, 16, batch_size=2)
    alone = [write(one, prompt, 16) for prompt in PROMPTS]
    assert [(text.tokens, text.rounds) for text in together] == [
        (text.tokens, text.rounds) for text in alone
    ]


def test_verification_from_layer_n_on_is_the_whole_one() -> None:
    texts = []
    for reuse in (True, False):
        made = drafter(reuse=reuse)
        assert made.lower_layers == (2 if reuse else 0)
        texts.append(write(engine("llama", made, DYNAMIC), PROMPTS[0], 40))
    assert texts[0].tokens == texts[1].tokens
    ours, whole = ([replace(one, layers=None) for one in text.rounds] for text in texts)
    assert ours == whole
    layers = [sum(one.layers or 0 for one in text.rounds) for text in texts]
    assert layers[0] <= layers[1]


def test_a_pass_costs_its_layers_one_more_and_the_head() -> None:
    model = target("llama").model
    layer, head = (
        sum(weight.numel() for weight in part.parameters())
        for part in (model.model.layers[0], model.lm_head)
    )
    whole = LAYERS * layer + head
    assert drafter().pass_cost == pytest.approx((3 * layer + head) / whole)
    narrow = drafter(draft_vocabulary=6).pass_cost
    assert narrow == pytest.approx((3 * layer + head / 2) / whole)
    assert drafter(trained=3).pass_cost == pytest.approx((5 * layer + head) / whole)


def test_compiled_passes_draft_and_verify_the_same() -> None:
    pretend, host = Pretend(), target("llama")
    fast: Target = host.compiled(lambda line: None, pretend)
    texts = [write(engine("llama", drafter(), CHAIN), PROMPTS[0], 24)]
    made = drafter()
    made.host = fast
    one = engine("llama", made.compiled(lambda line: None, pretend), CHAIN)
    one.target = fast.tapped(made.taps)
    texts.append(write(one, PROMPTS[0], 24))
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].rounds == texts[1].rounds
    assert {name.partition("-")[0] for name in pretend.names} >= {"draft", "drafter", "verify"}


# --- the trained layer -----------------------------------------------------------------------


def test_several_trained_layers_draft_the_targets_own_text() -> None:
    deep = drafter(layers=1, trained=2)
    for tree in (CHAIN, DYNAMIC):
        assert accepted(lossless_rounds(engine("llama", deep, tree), PROMPTS[:2], 16)) > 0
    together = write_together(engine("llama", deep, CHAIN), PROMPTS, 12, batch_size=2)
    alone = [write(engine("llama", deep, CHAIN), prompt, 12) for prompt in PROMPTS]
    assert [text.tokens for text in together] == [text.tokens for text in alone]


@pytest.mark.parametrize("trained", [1, 2])
@torch.no_grad()
def test_it_begins_as_the_targets_last_layers_and_norm(trained: int) -> None:
    host = target("llama")
    made = drafter(stir=0.0, layers=LAYERS - trained, trained=trained)
    tokens = torch.tensor([PROMPTS[1]])
    positions = torch.arange(4)[None]
    causal = torch.ones(1, 4, 4, dtype=torch.bool).tril()
    features, taps = host.tapped(made.taps).tapped_teacher(
        tokens, torch.zeros_like(tokens), positions
    )
    found = made.backbone(embeddings=taps[:, :, 0], positions=positions, mask=causal)
    torch.testing.assert_close(found, features)


def predicted(made: EesdDrafter, text: list[int]) -> Prediction:
    given = packed([[torch.tensor(text)]])
    with torch.no_grad():
        found: Prediction = made(training_inputs(target("llama"), made, given, torch.Generator()))
    return found


@torch.no_grad()
def test_a_row_is_the_layers_output_at_the_token_that_it_follows() -> None:
    made, text = drafter(), [4, 2, 9, 1, 7, 3]
    found = predicted(made, text)
    tokens = torch.tensor([text])
    positions = torch.arange(len(text))[None]
    _, taps = (
        target("llama")
        .tapped(made.taps)
        .tapped_teacher(tokens, torch.zeros_like(tokens), positions)
    )
    count = len(text) - 1
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    expected = made.backbone(embeddings=taps[:, 1:, 0], positions=positions[:, :count], mask=causal)
    assert found.features is not None
    known = found.features.shape[1] - 1  # the last row's label is beyond the sequence
    torch.testing.assert_close(found.features[:, :known], expected[:, :known])
    assert torch.equal(found.label, found.source + 1)


def test_it_is_neither_shown_labels_nor_unrolled() -> None:
    made = drafter()
    given = packed([[torch.tensor([4, 2, 9, 1, 7])]])
    inputs = training_inputs(target("llama"), made, given, torch.Generator())
    shown = Reveal(inputs.tokens > 0, inputs.tokens, inputs.features)
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        made(inputs, shown)
    with pytest.raises(FalconLabError, match="unroll"):
        made.unroll(inputs)
    assert not made.unrolls


def taken(made: EesdDrafter) -> int:
    return accepted(lossless_rounds(engine("llama", made, CHAIN), PROMPTS, 30))


def test_distilling_makes_a_better_drafter_that_can_be_saved(tmp_path: Path) -> None:
    host, made = target("llama"), drafter(stir=0.2)
    before = taken(made)
    module = distillation(host, made, objective=OBJECTIVE, components=KNOWN, steps=60)
    _, values = distil(module, own_texts(host, 12))
    assert "val/position_1/accuracy" in values
    after = taken(made)
    assert after > 2 * max(before, 5)

    node = {"name": "eesd", "layers": 2}
    known = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "saved", made, node=node, provenance=known, target=host, card="")
    assert taken(load_drafter(tmp_path / "saved", host, KNOWN)) == after


# --- configuration ---------------------------------------------------------------------------


def test_a_quarter_of_the_layers_is_the_default_and_all_of_them_are_refused() -> None:
    eight = tiny_target(vocab=12, layers=8)
    assert build_drafter(eight, {"name": "eesd"}, components=KNOWN).taps == (2,)
    assert drafter(layers=None).taps == (1,)
    with pytest.raises(FalconLabError, match="layers is 4, and the target has 4"):
        drafter(layers=LAYERS)


def test_it_may_draft_some_tokens_alone() -> None:
    made = drafter(draft_vocabulary=8)
    assert made.draft_vocabulary is not None
    lossless_rounds(engine("llama", made, DYNAMIC), PROMPTS[:1], 16)
