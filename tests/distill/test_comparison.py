"""Rows and the logits that are made of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distilling import batch
from falcon_lab.distill.labels import Labels
from falcon_lab.distill.loss import FLOAT32, MIB, StudentRows, Teacher, rows_at_once
from falcon_lab.interfaces import Prediction
from tiny_models import tiny_target


@pytest.mark.parametrize(("vocabulary", "mebibytes"), [(512, 1), (128_000, 256), (10**9, 1)])
def test_two_logits_of_so_many_rows_fill_the_room(vocabulary: int, mebibytes: int) -> None:
    rows = rows_at_once(vocabulary, mebibytes)
    taken = 2 * FLOAT32 * vocabulary
    assert rows >= 1
    assert rows == 1 or rows * taken <= mebibytes * MIB < (rows + 1) * taken


def test_rows_about_one_position_are_neighbours() -> None:
    label = torch.tensor([[3, 1, 2], [0, 1, 9], [1, 2, 3], [5, 0, 1]])  # two copies of 2 x 10
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]]).bool()
    features = torch.arange(12.0).view(4, 3, 1)
    zeros = torch.zeros_like(label)
    prediction = Prediction(features, None, label, label, label % 3, zeros)
    labels = Labels(valid, label, 100 + label)
    rows = StudentRows.of(prediction, labels, torch.Size([2, 10]))
    assert rows.places.tolist() == [1, 1, 2, 3, 3, 10, 10, 11, 15, 19]
    assert rows.features is not None
    assert torch.equal(rows.features, features[rows.index])
    assert torch.equal(rows.tokens, rows.places % 10 + 100)
    assert torch.equal(rows.slot, rows.places % 10 % 3)
    assert torch.equal(torch.cat([part.slot for part in rows.parts(4)]), rows.slot)
    assert [len(part) for part in rows.parts(4)] == [4, 4, 2]
    assert torch.equal(torch.cat([part.places for part in rows.parts(4)]), rows.places)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_the_target_s_choices_and_logits_do_not_depend_on_the_room(size: int) -> None:
    target, given = tiny_target(), batch(3)
    features = target.teacher(given.tokens, given.documents, given.positions)
    sizes: list[int] = []
    head = target.head

    def watched(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return head(rows)

    target.head = watched  # type: ignore[method-assign]
    teacher = Teacher(target, given, features, size)
    expected = head(features).flatten(0, 1)
    labelled = (given.documents[:, 1:] == given.documents[:, :-1]).flatten()
    places = torch.arange(48).view(2, 24)[:, :-1].flatten()[labelled]
    assert torch.equal(teacher.choices()[places], expected[places].argmax(-1))
    assert max(sizes) <= size
    before = len(sizes)
    wanted = places[3:7].repeat_interleave(2)
    assert torch.allclose(teacher.logits(wanted), expected[wanted], atol=1e-5)
    assert sizes[before:] == ([] if size == 1000 else [4]), "equal places are computed once"
