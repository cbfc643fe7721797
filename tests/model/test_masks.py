"""Masks against their definitions, entry by entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.errors import FalconLabError
from falcon_lab.model.masks import causal_mask, for_attention, packed_mask, windowed

CPU = torch.device("cpu")


def test_a_causal_row_sees_the_cached_rows_and_itself() -> None:
    assert causal_mask(2, 3, CPU).int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]


@given(st.lists(st.integers(-1, 2), min_size=1, max_size=9))
def test_packed_rows_see_earlier_rows_of_their_own_document_alone(documents: list[int]) -> None:
    documents = sorted(documents, key=lambda document: document if document >= 0 else 99)
    mask = packed_mask(torch.tensor([documents]))[0]
    for i, mine in enumerate(documents):
        for j, theirs in enumerate(documents):
            assert bool(mask[i, j]) == (j <= i and mine == theirs)


def test_no_row_of_a_packed_mask_is_blind_to_itself() -> None:
    assert packed_mask(torch.tensor([[0, 0, 1, -1, -1]]))[0].diagonal().all()


def test_a_window_counts_positions_and_not_rows() -> None:
    # Two branches: rows 2 and 3 are siblings at position 2, row 4 is at position 3.
    positions = torch.tensor([[0, 1, 2, 2, 3]])
    everything = torch.ones(1, 5, 5, dtype=torch.bool)
    seen = windowed(everything, positions, positions, window=2)[0]
    assert seen[4].int().tolist() == [0, 0, 1, 1, 1]
    assert seen[2].int().tolist() == [0, 1, 1, 1, 1]


def test_eager_gets_a_float_mask_because_it_adds_it() -> None:
    mask = causal_mask(2, 1, CPU)
    form = for_attention(mask, "eager", torch.float16)
    assert form.shape == (1, 1, 2, 3)
    assert form.dtype == torch.float16
    assert torch.equal(form == 0, mask[:, None])
    assert (form[~mask[:, None]] == torch.finfo(torch.float16).min).all()


def test_sdpa_gets_a_bool_mask() -> None:
    form = for_attention(causal_mask(2, 1, CPU), "sdpa", torch.float32)
    assert form.dtype == torch.bool
    assert form.shape == (1, 1, 2, 3)


def test_flex_attention_gets_a_block_mask_that_says_the_same() -> None:
    mask = torch.stack([causal_mask(3, 2, CPU)[0], torch.eye(3, 5, dtype=torch.bool)])
    form = for_attention(mask, "flex_attention", torch.float32)
    index = [torch.tensor(i) for i in range(5)]
    said = [
        [
            [bool(form.mask_mod(index[b], index[0], index[q], index[k])) for k in range(5)]
            for q in range(3)
        ]
        for b in range(2)
    ]
    assert said == mask.tolist()
    assert form.shape == (2, 1, 3, 5)


def test_an_attention_that_takes_no_mask_is_refused() -> None:
    with pytest.raises(FalconLabError, match="'flash_attention_2' cannot take a tree mask"):
        for_attention(causal_mask(1, 0, CPU), "flash_attention_2", torch.float32)
