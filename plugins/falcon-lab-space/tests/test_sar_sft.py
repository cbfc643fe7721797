from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from falcon_lab_space.mask_token import take_mask_token
from falcon_lab_space.tuner import NONE, Rows, packed_rows, truncated_rows
from space_cases import target, tuner, tuning_batch
from torch import Tensor

from falcon_lab import testing
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import TuningBatch

MASK = 11


def batch_of_two() -> TuningBatch:
    """Two documents in one sequence; the first three tokens of each are a question."""
    first, second = torch.arange(0, 8), torch.arange(0, 9)
    batch = testing.packed([[first, second]])
    return TuningBatch(
        batch.tokens,
        batch.positions > 2,
        batch.documents,
        batch.positions,
        torch.Generator().manual_seed(3),
    )


def predictions(rows: Rows, batch: TuningBatch, masks: bool) -> list[tuple[int, int, int]]:
    """Document, position and label of the rows that count."""
    found = []
    for n in ((rows.labels[0] != NONE) & (rows.masks[0] == masks)).nonzero().flatten().tolist():
        seen = rows.mask[0, n, : batch.tokens.shape[1]].nonzero().flatten()
        document = int(batch.documents[0, seen[0]])
        found.append((document, int(rows.positions[0, n]), int(rows.labels[0, n])))
    return found


def test_masks_behind_a_position_are_asked_for_what_follows() -> None:
    batch = batch_of_two()
    rows = packed_rows(batch, 2, 17, MASK)
    # Token and position are the same number here, so that a row's label is the next position.
    assert all(label == at + 1 for _, at, label in predictions(rows, batch, masks=True))
    assert predictions(rows, batch, masks=False) == [
        *((0, at, at + 1) for at in range(2, 7)),
        *((1, at, at + 1) for at in range(2, 8)),
    ]
    assert len(predictions(rows, batch, masks=True)) == (5 + 4 + 1 + 6 + 5 + 1)


def test_masks_see_their_own_context_and_nothing_sees_them() -> None:
    batch = batch_of_two()
    rows = packed_rows(batch, 3, 5, MASK)
    tokens = batch.tokens.shape[1]
    assert not rows.mask[0, :tokens, tokens:].any()
    for n in range(tokens, rows.tokens.shape[1]):
        seen = rows.mask[0, n].nonzero().flatten()
        mine = seen[seen >= tokens]
        text = seen[seen < tokens]
        assert int(mine[-1]) == n
        place = (n - tokens) % 3
        assert mine.tolist() == list(range(n - place, n + 1))
        assert rows.positions[0, text].tolist() == list(range(len(text)))
        assert int(rows.positions[0, n]) == len(text) + place
    assert (rows.tokens[0, tokens:] == MASK).all()


def test_a_cut_document_ends_in_masks() -> None:
    batch = batch_of_two()
    seen: set[tuple[int, ...]] = set()
    for _ in range(20):
        rows = truncated_rows(batch, 2, 0, MASK)
        at = rows.masks[0].nonzero().flatten().tolist()
        assert (rows.tokens[0, at] == MASK).all()
        for document in (0, 1):
            here = [n for n in at if batch.documents[0, n] == document]
            if here:
                assert len(here) <= 2
                assert int(batch.positions[0, here[0]]) >= 3
                after = (batch.documents[0] == document) & (torch.arange(17) > here[-1])
                assert (rows.labels[0, after] == NONE).all()
        labels: Tensor = rows.labels[0][rows.labels[0] != NONE]
        assert (labels == rows.positions[0][rows.labels[0] != NONE] + 1).all()
        seen.add(tuple(at))
    assert () in seen
    assert len(seen) > 4


def test_a_reserved_token_is_taken_before_a_new_one() -> None:
    model, tokenizer = (copy.deepcopy(each) for each in (target().model, target().tokenizer))
    assert take_mask_token(model, tokenizer, None) == 12
    assert tokenizer.mask_token == "<|mask|>"
    assert model.get_input_embeddings().weight.shape[0] == 13
    assert model.get_output_embeddings().weight.shape[0] == 13
    tokenizer = copy.deepcopy(target().tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<|reserved_7|>"]})
    assert take_mask_token(model, tokenizer, None) == 13
    assert tokenizer.mask_token == "<|reserved_7|>"


@pytest.mark.parametrize(
    ("token", "why"), [("<eos>", "ends or fills"), ("a", "ordinary text"), ("<t>", "template")]
)
def test_a_mask_token_that_is_used_is_refused(token: str, why: str) -> None:
    model, tokenizer = (copy.deepcopy(each) for each in (target().model, target().tokenizer))
    tokenizer.chat_template = "<t>{{ messages[0].content }}"
    with pytest.raises(FalconLabError, match=why):
        take_mask_token(model, tokenizer, token)


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(**options: Any) -> Any:
        made = tuner(**options)
        made.begin(copy.deepcopy(target().model), copy.deepcopy(target().tokenizer))
        return made

    with pytest.raises(FalconLabError, match="256 positions do not suffice"):
        begun(length=255)
    with pytest.raises(FalconLabError, match="documents contain it"):
        begun(mask_token="<m>").losses(tuning_batch(torch.tensor([[3, 12, 4]])))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FalconLabError, match="pip install"):
        tuner(weights="lora")
