from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from falcon_lab_medusa import MedusaConfig
from medusa_cases import KNOWN, drafter, target

from falcon_lab import fields
from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import label_rows
from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.errors import ConfigError
from falcon_lab.interfaces import (
    DrafterInputs,
    Frontier,
    Observation,
    TrainableDrafter,
    is_trainable,
)
from falcon_lab.testing import packed, training_inputs

ROOT = Frontier.root(torch.device("cpu"))
TEXT = torch.randint(0, 12, (2, 10), generator=torch.Generator().manual_seed(3))
WHOLE = packed([[row] for row in TEXT])
SPLIT = packed([[row[:6], row[6:]] for row in TEXT])


def inputs(of: Any, batch: Batch) -> DrafterInputs:
    return training_inputs(of, drafter(of), batch, torch.Generator())


@pytest.mark.parametrize("head", ["own", "shared"])
def test_untrained_heads_all_say_what_the_target_says(head: str) -> None:
    """The layers start as the identity and the output layers as the target's head."""
    model = target()
    rows = inputs(model, WHOLE)
    made = drafter(model, stir=0, head=head)
    made.observe(Observation(rows.tokens[0, :4], rows.features[0, :4]))
    expected = model.head(rows.features[0, 3]).expand(4, -1)
    torch.testing.assert_close(made.draft(ROOT).logits[0], expected)


@pytest.mark.parametrize("head", ["own", "shared"])
def test_it_drafts_as_it_is_trained(head: str) -> None:
    model = target()
    rows, made = inputs(model, WHOLE), drafter(model, head=head)
    prediction = made(rows)
    made.observe(Observation(rows.tokens[0, :4], rows.features[0, :4]))
    made.observe(Observation(rows.tokens[0, 4:6], rows.features[0, 4:6]))
    drafted = made.draft(ROOT)
    at = (prediction.source[0] == 5).nonzero().flatten()
    assert prediction.slot[0, at].tolist() == [0, 1, 2, 3]
    hidden = (prediction.hidden if head == "own" else prediction.features)[0, at]
    torch.testing.assert_close(drafted.features[0], hidden)
    logits = (
        prediction.head(hidden, prediction.slot[0, at]) if head == "own" else model.head(hidden)
    )
    torch.testing.assert_close(drafted.logits[0], logits)


def test_the_rows_of_a_head_are_computed_by_that_head_whatever_their_order() -> None:
    model = target()
    made, features = drafter(model), torch.randn(9, 32)
    slot = torch.tensor([2, 0, 2, 3, 0, 3, 3, 2, 0])  # no row of head 1
    expected = torch.stack([made.heads[s](f) for s, f in zip(slot, features, strict=True)])
    torch.testing.assert_close(made._own_logits(features, slot), expected)


def test_head_j_is_taught_the_token_j_below_the_root() -> None:
    """h_t draws the root x_{t+1}; the first head is about x_{t+2}."""
    model = target()
    prediction = drafter(model)(inputs(model, SPLIT))
    labels = label_rows(SPLIT, prediction)
    for row in range(prediction.slot.shape[1]):
        t, head = int(prediction.source[0, row]), int(prediction.slot[0, row]) + 1
        about = t + 1 + head
        inside = about < 10 and SPLIT.documents[0, about] == SPLIT.documents[0, t]
        assert bool(labels.valid[0, row]) == bool(inside)
        if inside:
            assert int(labels.tokens[0, row]) == int(TEXT[0, about])


def test_every_head_is_a_module_of_its_own() -> None:
    made = drafter(target(), layers=2)
    weights = {id(parameter) for parameter in made.parameters()}
    assert len(weights) == 4 * (2 * 2 + 1)
    assert len({parameter.data_ptr() for parameter in made.parameters()}) == len(weights)


def test_below_its_heads_it_has_nothing_to_say() -> None:
    below = Frontier(torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    assert drafter(target()).draft(below).logits.shape == (3, 0, 12)


def test_a_new_sequence_forgets_the_old_one() -> None:
    made = drafter(target())
    made.observe(Observation(torch.tensor([1]), torch.zeros(1, 32)))
    made.reset(torch.tensor(1))
    with pytest.raises(RuntimeError, match="observe"):
        made.draft(ROOT)


def test_it_is_a_trainable_drafter() -> None:
    made = drafter(target(), block=2)
    assert isinstance(made, TrainableDrafter)
    assert is_trainable(made)
    assert (made.block, made.needs, made.max_passes) == (2, {"features"}, 1)


@pytest.mark.parametrize("head", ["own", "shared"])
def test_a_saved_drafter_drafts_the_same(head: str, tmp_path: Path) -> None:
    model = target()
    made = drafter(model, head=head)
    node = {"name": "medusa", "head": head}
    provenance = KNOWN.provenance("drafter", node)
    save_drafter(tmp_path / "d", made, node=node, provenance=provenance, target=model, card="")
    again = load_drafter(tmp_path / "d", model, KNOWN)
    seen = Observation(torch.tensor([1, 2]), torch.randn(2, 32))
    made.observe(seen)
    again.observe(seen)
    assert torch.equal(made.draft(ROOT).logits, again.draft(ROOT).logits)


@pytest.mark.parametrize(("key", "value"), [("block", 0), ("layers", 0), ("head", "none")])
def test_a_wrong_option_of_the_heads_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"drafter.{key}"):
        fields.options(MedusaConfig, {key: value}, "drafter")
