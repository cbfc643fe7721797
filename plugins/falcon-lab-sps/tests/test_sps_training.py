"""A fresh draft model is distilled by the module that trains every drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_sps.drafter import SpsDrafter
from sps_cases import KNOWN, VOCAB, drafter, engine, target, tell, uncached
from torch import Tensor

from falcon_lab.data.packing import Batch
from falcon_lab.distill.module import Distillation
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import DrafterInputs, Reveal, is_trainable
from falcon_lab.testing import (
    accepted,
    distil,
    distillation,
    lossless_rounds,
    own_texts,
    packed,
    training_inputs,
)

TEACHER = target("llama")


def letters(count: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def batch() -> Batch:
    """Return two documents a sequence, of letters in random order."""
    return packed([[row[:9], row[9:]] for row in letters(8, 24)])


def fresh() -> SpsDrafter:
    return drafter(stir=0, layers=1)


def module(draft: SpsDrafter, *, feature: float = 0.0, **settings: Any) -> Distillation:
    objective = {"name": "falcon", "feature": feature, "soft": 1.0, "hard": 0.1}
    return distillation(TEACHER, draft, objective=objective, components=KNOWN, **settings)


def taken(draft: SpsDrafter) -> int:
    """Draft tokens that are accepted over texts which are the target's own."""
    one = engine("llama", draft, {"name": "chain", "depth": 3})
    return accepted(lossless_rounds(one, [[5, 3, 2], [7, 7, 1], [2, 9, 4]], 40))


def test_distilling_makes_a_better_drafter_that_can_be_saved(tmp_path: Path) -> None:
    draft = fresh()
    before = taken(draft)
    _, values = distil(module(draft, steps=60), own_texts(TEACHER, 12))
    assert {"val/loss", "val/position_1/accuracy", "val/expected_accept_length"} <= values.keys()
    assert "val/loss/feature" not in values
    after = taken(draft)
    assert after > 2 * max(before, 5)

    node = {"name": "sps", "layers": 1}
    known = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "saved", draft, node=node, provenance=known, target=TEACHER, card="")
    assert taken(load_drafter(tmp_path / "saved", TEACHER, KNOWN)) == after


def inputs(draft: SpsDrafter, given: Batch) -> DrafterInputs:
    return training_inputs(TEACHER, draft, given, torch.Generator())


@torch.no_grad()
def test_training_sees_what_drafting_sees() -> None:
    draft, text = fresh(), [4, 2, 9, 1, 7, 3]
    found = draft(inputs(draft, packed([[torch.tensor(text)]]))).logits[0]
    draft.reset(torch.tensor(text[0]))
    for place in range(1, len(text)):
        tell(draft, text[place : place + 1])
        assert torch.allclose(found[place - 1], uncached(draft, text[: place + 1]), atol=1e-5)


@torch.no_grad()
def test_a_document_does_not_see_the_one_before() -> None:
    draft, both = fresh(), batch()
    whole = draft(inputs(draft, both)).logits[:, 9:]
    alone = packed([[row[9:]] for row in both.tokens])
    assert torch.allclose(whole, draft(inputs(draft, alone)).logits, atol=1e-5)


def test_repeats_and_a_schedule_for_blocks_do_no_harm() -> None:
    trained = module(fresh(), schedule={"name": "csgd"}, repeats=2)
    loss, tally = trained.step(batch()).train(trained.schedule.ratio(0.0), accuracy=True)
    loss.backward()
    assert {"train/loss", "train/loss/soft", "train/position_1/accuracy"} <= tally.reduced().keys()


def test_it_has_nothing_to_glance_at() -> None:
    draft, given = fresh(), batch()
    assert is_trainable(draft)
    shown = Reveal(given.loss_mask, given.tokens, torch.zeros(8, 24, 32))
    with pytest.raises(FalconLabError, match=r"glancing\.name=none"):
        draft(inputs(draft, given), shown)


def test_an_objective_that_wants_features_is_refused_with_what_to_do() -> None:
    with pytest.raises(FalconLabError, match=r"objective\.feature=0"):
        module(fresh(), feature=1.0).step(batch()).train(0.0)
