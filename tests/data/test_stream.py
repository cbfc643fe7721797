import copy
from itertools import islice
from typing import Any

import pytest
import torch

from falcon_lab.data.encoding import Encoded
from falcon_lab.data.packing import PADDING, Batch, PackedSequences, pack
from falcon_lab.data.stream import Batches, BatchStream, Share, ValidationBatches
from falcon_lab.errors import FalconLabError


def rows(count: int, length: int = 4) -> PackedSequences:
    """Row n holds nothing but token n + 1."""
    return pack([Encoded([n + 1] * length, [True] * length) for n in range(count)], length)


def row_numbers(batch: Batch) -> list[int]:
    return [token - 1 for token in batch.tokens[:, 0].tolist()]


def test_a_batch_has_the_agreed_shapes_and_types() -> None:
    batch = Batches(rows(5), 2, seed=0)[3]
    for field in (batch.tokens, batch.documents, batch.positions):
        assert (field.shape, field.dtype) == ((2, 4), torch.long)
    assert (batch.loss_mask.shape, batch.loss_mask.dtype) == ((2, 4), torch.bool)
    assert (batch.index.shape, batch.index.item()) == ((), 3)
    assert batch.features is None


def test_every_epoch_holds_every_row_once_though_batches_cross_epochs() -> None:
    batches = Batches(rows(7), 3, seed=1)
    drawn = [row for number in range(14) for row in row_numbers(batches[number])]
    epochs = [drawn[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_batch_is_the_same_whichever_was_asked_before() -> None:
    forward, backward = (Batches(rows(9), 4, seed=2) for _ in range(2))
    numbers = list(range(30))
    expected = {n: row_numbers(forward[n]) for n in numbers}
    assert {n: row_numbers(backward[n]) for n in reversed(numbers)} == expected
    assert row_numbers(Batches(rows(9), 4, seed=3)[0]) != expected[0]


def test_a_batch_larger_than_the_data_holds_rows_several_times() -> None:
    assert sorted(row_numbers(Batches(rows(2), 8, seed=0)[5])) == [0] * 4 + [1] * 4


def test_processes_share_the_batches_without_sharing_one() -> None:
    batches = Batches(rows(11), 2, seed=0)
    whole = [(int(b.index), row_numbers(b)) for b in BatchStream(batches, 12)]
    parts = [
        [(int(b.index), row_numbers(b)) for b in BatchStream(batches, 4, Share(rank, 3))]
        for rank in range(3)
    ]
    assert [pair for step in zip(*parts, strict=True) for pair in step] == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 1, 4, 5])
def test_a_restored_stream_goes_on_with_the_next_batch(workers: int, taken: int) -> None:
    batches = Batches(rows(5), 2, seed=0)
    whole = [row_numbers(batch) for batch in BatchStream(batches, 6)]
    first = BatchStream(batches, 6, workers=workers)
    seen = [row_numbers(batch) for batch in islice(first, taken)]
    state = copy.deepcopy(first.state_dict())
    second = BatchStream(batches, 6, workers=workers)
    second.load_state_dict(state)
    assert len(second) == 6
    assert seen + [row_numbers(batch) for batch in second] == whole


def test_state_counts_batches_handed_out_and_not_those_prepared_ahead() -> None:
    stream = BatchStream(Batches(rows(5), 2, seed=0), 6, Share(1, 2), workers=2)
    taking = iter(stream)
    for expected in (2, 4, 6):
        next(taking)
        assert stream.state_dict()["batches"] == expected


def test_a_finished_stream_goes_on_into_its_next_pass() -> None:
    stream = BatchStream(Batches(rows(4), 2, seed=0), 2)
    assert [[int(b.index) for b in stream] for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_other_data_or_other_processes_are_refused() -> None:
    state = BatchStream(Batches(rows(5), 2, seed=0), 6).state_dict()
    with pytest.raises(FalconLabError, match="batch size of 2, this run has 3"):
        BatchStream(Batches(rows(5), 3, seed=0), 6).load_state_dict(state)
    with pytest.raises(FalconLabError, match="numbering 5, this run has 6"):
        BatchStream(Batches(rows(6), 2, seed=0), 6).load_state_dict(state)
    with pytest.raises(FalconLabError, match="3 processes cannot share evenly"):
        BatchStream(Batches(rows(5), 2, seed=0), 6, Share(0, 3)).load_state_dict(
            {**state, "batches": 4}
        )


def test_a_stream_leaves_the_global_randomness_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(BatchStream(Batches(rows(5), 2, seed=0), 3))
    assert torch.equal(torch.rand(1), expected)


def test_validation_shows_every_row_once_and_fills_up_with_padding() -> None:
    shares = [list(ValidationBatches(rows(5), 2, Share(rank, 2))) for rank in range(2)]
    assert [[b.tokens.shape[0] for b in batches] for batches in shares] == [[2, 1], [2, 1]]
    everything: list[Any] = [b for batches in shares for b in batches]
    seen = sorted(token for b in everything for token in row_numbers(b))
    assert seen == [-1, 0, 1, 2, 3, 4]
    filler = shares[1][1]
    assert not filler.loss_mask.any()
    assert (filler.documents == PADDING).all()
    assert len(ValidationBatches(rows(5), 2)) == 3
