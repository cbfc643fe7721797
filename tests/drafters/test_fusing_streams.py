"""Streams against one padded sequence a document."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from falcon_lab.drafters import recurrence
from falcon_lab.drafters.fusing import Fuse, Streams, best_fit
from falcon_lab.drafters.relaxed_mask import find_documents

HIDDEN = 5


def _documents(seed: int, sequences: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(sequences, length, generator=generator) < 0.3
    return starts.long().cumsum(1)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_documents_overlap_nowhere_and_keep_a_row_between_them(sizes: list[int]) -> None:
    length = max(sizes)
    starts, count = best_fit(sizes, length)
    taken: dict[int, int] = {}
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        assert start // length == (start + size - 1) // length, "in one stream"
        for place in range(start, start + size):
            assert place not in taken
            taken[place] = number
    for place, number in taken.items():
        before = taken.get(place - 1)
        assert place % length == 0 or before is None or before == number
    assert {start // length for start in starts} == set(range(count))


def test_short_documents_fill_streams_of_the_longest() -> None:
    assert best_fit([9, 4, 4, 3, 5], 9)[1] == 3


@settings(max_examples=25)
@given(seed=st.integers(0, 99), sequences=st.integers(1, 3), length=st.integers(1, 14))
def test_rows_come_back_where_they_were(seed: int, sequences: int, length: int) -> None:
    streams = Streams.of(find_documents(_documents(seed, sequences, length)))
    rows = torch.randn(sequences, length, 3)
    spread, free = streams.spread(rows)
    assert torch.equal(streams.gather(spread), rows)
    assert int((~free).sum()) == sequences * length
    assert not spread[free].any()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), layers=st.integers(1, 3), large=st.booleans())
def test_a_stream_s_documents_are_fused_as_if_each_stood_alone(
    seed: int, layers: int, large: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrence, "LARGE", 0 if large else recurrence.LARGE)
        _compare_streams_with_padding(seed, layers)


def _compare_streams_with_padding(seed: int, layers: int) -> None:
    torch.manual_seed(seed)
    fuse = Fuse("lstm", HIDDEN, layers=layers, dropout=0.0)
    documents = find_documents(_documents(seed, 3, 14))
    streams = Streams.of(documents)
    results = []
    for way in ("padded", "streams"):
        rows = 3 * torch.randn(3, 14, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
        rows.requires_grad_()
        fuse.zero_grad()
        if way == "padded":
            fused = documents.pack(fuse(documents.unpack(rows))[0])
        else:
            fused = streams.gather(fuse.in_streams(*streams.spread(rows)))
        (fused * torch.linspace(1, 2, HIDDEN)).sum().backward()  # type: ignore[no-untyped-call]
        results.append([fused, rows.grad, *(p.grad for p in fuse.parameters())])
    for padded, streamed in zip(*results, strict=True):
        assert padded is not None
        assert streamed is not None
        assert torch.allclose(padded, streamed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_not_a_trace_of_a_document_reaches_the_next(
    dtype: torch.dtype, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "LARGE", 0 if large else recurrence.LARGE)
    torch.manual_seed(0)
    fuse = Fuse("lstm", HIDDEN, layers=2, dropout=0.0).to(dtype)
    rows = torch.randn(1, 7, 2 * HIDDEN, dtype=dtype)
    rows[:, 3] = 0
    free = torch.zeros(1, 7, dtype=torch.bool)
    free[:, 3] = True
    other = rows.clone()
    other[:, :3] *= -50
    kept, changed = fuse.in_streams(rows, free), fuse.in_streams(other, free)
    assert torch.equal(kept[:, 4:], changed[:, 4:])
    assert not torch.equal(kept[:, :3], changed[:, :3])


def test_dropout_lies_between_the_layers_and_in_training_alone() -> None:
    torch.manual_seed(0)
    fuse = Fuse("lstm", HIDDEN, layers=2, dropout=0.5)
    rows, free = torch.randn(2, 6, 2 * HIDDEN), torch.zeros(2, 6, dtype=torch.bool)
    assert not torch.equal(fuse.in_streams(rows, free), fuse.in_streams(rows, free))
    fuse.eval()
    assert torch.equal(fuse.in_streams(rows, free), fuse.in_streams(rows, free))
