"""Rows that count, and what they should have predicted."""

import torch

from falcon_lab.data.packing import Batch
from falcon_lab.distill.rows import Labels, StudentRows, label_rows
from falcon_lab.interfaces import Prediction
from label_cases import one_batch, one_prediction, position_features


def _valid(label: list[int], source: list[int], given: Batch | None = None) -> list[bool]:
    labels = label_rows(given or one_batch(), one_prediction(label, source))
    return labels.valid[0].tolist()


def test_the_label_gives_the_feature_and_the_token_after_it() -> None:
    labels = label_rows(one_batch(), one_prediction([2, 3], [1, 1]))
    assert labels.features(position_features())[0, :, 0].tolist() == [2, 3]
    assert labels.tokens[0].tolist() == [103, 104]


def test_labels_whose_next_token_is_of_another_document_do_not_count() -> None:
    # h_3 is about token 4, the document's last; h_4 would be about the next document.
    assert _valid([3, 4, 5, 6, 7], [2, 3, 5, 5, 6]) == [True, False, True, True, False]


def test_a_row_whose_newest_input_is_of_another_document_does_not_count() -> None:
    assert _valid([5, 6, 6], [4, 4, 5]) == [False, False, True]


def test_labels_outside_the_sequence_do_not_count() -> None:
    whole = one_batch()._replace(
        documents=torch.zeros(1, 10, dtype=torch.long),
        loss_mask=torch.ones(1, 10, dtype=torch.bool),
    )
    assert _valid([-1, 8, 9, 12], [0, 7, 8, 8], whole) == [False, True, False, False]
    assert _valid([3, 3], [-1, 11], whole) == [False, False]


def test_padding_never_counts() -> None:
    given = one_batch()._replace(loss_mask=torch.ones(1, 10, dtype=torch.bool))
    assert _valid([8], [8], given) == [False]


def test_only_tokens_that_are_to_be_learnt_count() -> None:
    mask = one_batch().loss_mask.clone()
    mask[0, 3] = False
    # The mask is that of the predicted token, label + 1.
    assert _valid([1, 2, 3], [0, 1, 2], one_batch()._replace(loss_mask=mask)) == [True, False, True]


def test_rows_about_one_position_are_neighbours() -> None:
    label = torch.tensor([[3, 1, 2], [0, 1, 9], [1, 2, 3], [5, 0, 1]])  # two copies of 2 x 10
    valid = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]]).bool()
    features = torch.arange(12.0).view(4, 3, 1)
    zeros = torch.zeros_like(label)
    prediction = Prediction(features, None, label, label, label % 3, zeros)
    labels = Labels(valid, label, 100 + label)
    rows = StudentRows.of(prediction, labels, torch.Size([2, 10]))
    assert rows.positions.tolist() == [1, 1, 2, 3, 3, 10, 10, 11, 15, 19]
    assert rows.features is not None
    assert torch.equal(rows.features, features[rows.index])
    assert torch.equal(rows.tokens, rows.positions % 10 + 100)
    assert torch.equal(rows.slot, rows.positions % 10 % 3)
    assert torch.equal(torch.cat([part.slot for part in rows.chunks(4)]), rows.slot)
    assert [len(part) for part in rows.chunks(4)] == [4, 4, 2]
    assert torch.equal(torch.cat([part.positions for part in rows.chunks(4)]), rows.positions)


def test_rows_of_a_block_stay_together_where_they_are_asked_for_so() -> None:
    group = torch.tensor([[4, 2, 4, 2, 2, 7], [7, 7, 7, 7, 4, 4]])
    slot = torch.tensor([[1, 2, 0, 0, 1, 0], [3, 0, 2, 1, 0, 1]])
    valid = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1]]).bool()
    label = 2 * group + slot
    prediction = Prediction(None, label[..., None].float(), label, label, slot, group, weight=slot)
    labels = Labels(valid, label, label)
    rows = StudentRows.of(prediction, labels, torch.Size([2, 30]), by_group=True)
    assert rows.group is not None
    assert rows.group.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 4, 4]
    assert rows.slot.tolist() == [0, 1, 2, 0, 1, 0, 0, 1, 0, 1, 3]
    assert rows.weight is not None
    assert torch.equal(rows.weight, rows.slot)
    assert rows.total == float(rows.slot.sum())
    chunks = [
        [*range(len(part))] and part.group.tolist()
        for part in rows.chunks(4)
        if part.group is not None
    ]
    assert chunks == [[0, 0, 0], [1, 1, 2], [3, 3], [4, 4, 4]]
    assert [len(part) for part in rows.chunks(1)] == [3, 2, 1, 2, 3]
    none = StudentRows.of(
        prediction, labels._replace(valid=~valid & False), torch.Size([2, 30]), by_group=True
    )
    assert [len(part) for part in none.chunks(4)] == [0]
