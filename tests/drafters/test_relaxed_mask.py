import pytest
import torch

from falcon_lab.drafters.relaxed_mask import (
    divide,
    find_anchors,
    find_documents,
    itself_alone,
    query_mask,
    relaxed_causal_mask,
)


def _positions(documents: torch.Tensor) -> torch.Tensor:
    return find_documents(documents).offset


def test_runs_are_numbered_over_the_whole_batch_and_never_cross_sequences() -> None:
    packed = find_documents(torch.tensor([[5, 5, 7, 7, 7], [7, 7, 5, -1, -1]]))
    assert packed.number.tolist() == [[0, 0, 1, 1, 1], [2, 2, 3, 4, 4]]
    assert packed.offset.tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 1]]
    assert (packed.count, packed.longest) == (5, 3)


def test_packing_undoes_unpacking() -> None:
    packed = find_documents(torch.tensor([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 4, 4]]))
    rows = torch.randn(2, 6, 3)
    padded = packed.unpack(rows)
    assert padded.shape == (4, 6, 3)
    assert padded[0, 2:].eq(0).all()
    assert torch.equal(packed.pack(padded), rows)


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_a_row_sees_the_blocks_of_its_document_up_to_its_own(block: int) -> None:
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed, positions = find_documents(documents), _positions(documents)
    for phase in range(block):
        blocks = divide(packed, positions, torch.full_like(documents, phase), block)
        mask = relaxed_causal_mask(packed, blocks)[0]
        for i in range(12):
            for j in range(12):
                place = [(int(positions[0, t]) + phase) // block for t in (i, j)]
                expected = documents[0, i] == documents[0, j] and place[1] <= place[0]
                assert bool(mask[i, j]) == bool(expected), (phase, i, j)


def test_with_blocks_of_one_the_mask_is_causal() -> None:
    documents = torch.zeros(1, 9, dtype=torch.long)
    packed = find_documents(documents)
    blocks = divide(packed, _positions(documents), torch.zeros_like(documents), 1)
    assert torch.equal(relaxed_causal_mask(packed, blocks)[0], torch.ones(9, 9).tril().bool())


def test_blocks_are_unique_in_a_sequence_and_cut_at_the_ends_of_documents() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])
    phase = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    blocks = divide(find_documents(documents), _positions(documents), phase, 2)
    assert blocks.slot.tolist() == [[1, 0, 1, 0, 1, 0, 1, 0]]
    assert blocks.group.tolist() == [[0, 1, 1, 2, 2, 3, 3, 4]]


def test_anchors_are_the_newest_rows_of_whole_blocks() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 0, 1], [2, 2, 2, 2, 2, 2]])
    phase = torch.tensor([[2, 2, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]])
    anchors = find_anchors(divide(find_documents(documents), _positions(documents), phase, 3), 3)
    assert anchors.column.tolist() == [[0, 3], [2, 5]]
    phase[0] = 0
    anchors = find_anchors(divide(find_documents(documents), _positions(documents), phase, 3), 3)
    assert anchors.column.tolist() == [[2, 0], [2, 5]]
    assert anchors.present.tolist() == [[True, False], [True, True]]


def test_queries_see_their_anchor_s_past_and_each_other_and_nobody_sees_them() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 1]])
    packed = find_documents(documents)
    anchors = find_anchors(divide(packed, _positions(documents), torch.zeros_like(documents), 2), 2)
    assert anchors.column.tolist() == [[1, 3, 5]]
    mask = query_mask(packed, anchors, 2)[0]
    same = documents[0][:, None] == documents[0][None]
    assert torch.equal(mask[:6, :6], same & torch.ones(6, 6).tril().bool())
    assert not mask[:6, 6:].any()
    assert mask[6:, :6].int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 1, 1, 1, 1],
    ]
    own = torch.block_diag(*[torch.ones(2, 2)] * 3).bool()
    assert torch.equal(mask[6:, 6:], own)


def test_tokens_of_which_nothing_is_read_attend_to_themselves_alone() -> None:
    packed = find_documents(torch.tensor([[0, 0, 1, 1, 1, 1]]))
    zeros = torch.zeros(1, 6, dtype=torch.long)
    anchors = find_anchors(divide(packed, _positions(packed.number), zeros, 2), 2)
    whole = query_mask(packed, anchors, 2)
    mask = query_mask(packed, anchors, 2, contexts=False)
    assert torch.equal(mask[:, 6:], whole[:, 6:])
    assert torch.equal(mask[0, :6], torch.eye(6, 12).bool())
    assert torch.equal(itself_alone(whole[:, :4], before=3)[0], torch.eye(12)[3:7].bool())
