import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from falcon_lab.data.encoding import Encoded
from falcon_lab.data.packing import PADDING, PackedSequences, pack


def text(*tokens: int) -> Encoded:
    return Encoded(list(tokens), [True] * len(tokens))


def documents_of(rows: PackedSequences) -> list[tuple[list[int], list[bool]]]:
    found = []
    for number in range(len(rows)):
        for document in range(int(rows.documents[number].max()) + 1):
            here = rows.documents[number] == document
            found.append(
                (rows.tokens[number][here].tolist(), rows.loss_mask[number][here].tolist())
            )
    return found


def test_two_documents_that_fit_share_a_row() -> None:
    rows = pack([text(1, 2, 3), text(4, 5)], 6)
    assert rows.tokens.tolist() == [[1, 2, 3, 4, 5, 0]]
    assert rows.documents.tolist() == [[0, 0, 0, 1, 1, PADDING]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert rows.loss_mask.tolist() == [[True] * 5 + [False]]
    assert rows.filled == 5 / 6


def test_pieces_of_a_long_document_are_documents_of_their_own() -> None:
    rows = pack([text(*range(1, 8))], 3)
    assert rows.tokens.tolist() == [[1, 2, 3], [4, 5, 6], [7, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0]]
    joined = pack([text(*range(1, 8)), text(8)], 3)
    assert joined.documents[2].tolist() == [0, 1, PADDING]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(2, 16))
def test_packing_keeps_every_token_once_and_runs_unbroken(sizes: list[int], length: int) -> None:
    draw = random.Random(0)
    mask = [[True] + [draw.random() < 0.5 for _ in range(size - 1)] for size in sizes]
    documents = [
        Encoded([100 * number + place for place in range(size)], mask[number])
        for number, size in enumerate(sizes)
    ]
    rows = pack(documents, length)
    found = documents_of(rows)
    kept = [
        (document.tokens[start : start + length], document.loss_mask[start : start + length])
        for document in documents
        for start in range(0, len(document), length)
        if any(document.loss_mask[start : start + length])
    ]
    assert sorted(found) == sorted(kept)
    for row_documents, positions in zip(
        rows.documents.tolist(), rows.positions.tolist(), strict=True
    ):
        used = [d for d in row_documents if d != PADDING]
        assert row_documents == used + [PADDING] * (length - len(used))
        assert used == sorted(used)
        for number in set(used):
            own = [p for d, p in zip(row_documents, positions, strict=True) if d == number]
            assert own == list(range(len(own)))
    assert not rows.loss_mask[rows.documents == PADDING].any()


def test_rows_are_filled_well() -> None:
    draw = random.Random(1)
    rows = pack([text(*[7] * draw.randint(10, 60)) for _ in range(400)], 128)
    assert rows.filled > 0.95


def test_fingerprints_see_every_field_and_packing_repeats() -> None:
    documents = [text(1, 2, 3), text(4, 5)]
    first, again = pack(documents, 6), pack(documents, 6)
    assert first.fingerprint() == again.fingerprint()
    for name in PackedSequences.__slots__:
        changed = pack(documents, 6)
        field = getattr(changed, name)
        field[0, 0] = ~field[0, 0] if field.dtype == torch.bool else field[0, 0] + 1
        assert changed.fingerprint() != first.fingerprint(), name
    assert first.take(0).tokens.shape == (0, 6)


def test_nothing_gives_no_rows() -> None:
    assert len(pack([], 8)) == 0
    assert len(pack([Encoded([1, 2], [False, False])], 8)) == 0
