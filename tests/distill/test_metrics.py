import pytest
import torch

from falcon_lab.distill.metrics import (
    Tally,
    add_by_position,
    agreement,
    blocks_of,
    expected_length,
    means,
    overlap,
)
from falcon_lab.glancing import complete_blocks, number_blocks
from falcon_lab.interfaces import LabelledRows, Prediction

CPU = torch.device("cpu")


def _rows(student: torch.Tensor, teacher: torch.Tensor) -> LabelledRows:
    nothing = torch.zeros(student.shape[0], 1)
    tokens = torch.zeros(student.shape[0], dtype=torch.long)
    return LabelledRows(nothing, student, nothing, teacher, tokens, torch.Generator(), tokens)


def _prediction(slot: list[list[int]], group: list[list[int]]) -> Prediction:
    zeros = torch.zeros(len(slot), len(slot[0]), dtype=torch.long)
    return Prediction(None, None, zeros, zeros, torch.tensor(slot), torch.tensor(group))


def test_sums_and_counts_add_up_before_they_are_divided() -> None:
    tally = Tally(CPU)
    tally.add("a", torch.tensor([1.0, 2.0, 3.0]))
    tally.add("a", torch.tensor([10.0]))
    tally.add_sum("b", 4.0, 8)
    tally.add("empty", torch.tensor([]))
    assert tally.reduced() == {"a": (16, 4), "b": (4, 8), "empty": (0, 0)}
    assert means(tally.reduced()) == {"a": 4.0, "b": 0.5}


def test_a_tally_keeps_no_graph() -> None:
    tally = Tally(CPU)
    tally.add("a", torch.ones(2, requires_grad=True) * 2)
    assert tally.reduced() == {"a": (4, 2)}


def test_the_overlap_is_one_minus_the_total_variation() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]])
    assert overlap(_rows(q.log(), p.log())).tolist() == pytest.approx([0.7, 0.0, 1.0])
    assert agreement(_rows(q.log(), p.log())).tolist() == [False, False, True]


def test_blocks_are_numbered_sequence_by_sequence() -> None:
    number, sequence = number_blocks(torch.tensor([[7, 7, 9], [9, 7, 7]]))
    assert number.tolist() == [[0, 0, 1], [3, 2, 2]]
    assert sequence.tolist() == [0, 0, 1, 1]
    valid = torch.tensor([[True, True, True], [True, True, False]])
    assert complete_blocks(valid, number, 4, 2).tolist() == [True, False, False, False]


def test_a_block_s_length_ends_at_its_first_rejection() -> None:
    slot = [[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]]
    group = [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]]
    valid = torch.ones(1, 12, dtype=torch.bool)
    accepted = torch.tensor([1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0]).bool()
    where = blocks_of(_prediction(slot, group), valid, 3)
    assert expected_length(accepted, where).tolist() == [4, 2, 1, 3]
    likely = expected_length(torch.full((12,), 0.5), where)
    assert likely.tolist() == pytest.approx([1.875] * 4)


def test_incomplete_blocks_have_no_length() -> None:
    slot, group = [[1, 0, 1, 0]], [[0, 1, 1, 2]]
    valid = torch.tensor([[True, True, True, True]])
    where = blocks_of(_prediction(slot, group), valid, 2)
    assert expected_length(torch.ones(4), where).tolist() == [3]
    valid[0, 2] = False
    where = blocks_of(_prediction(slot, group), valid, 2)
    assert expected_length(torch.ones(3), where).tolist() == []


def test_positions_are_counted_from_one() -> None:
    slot, group = [[0, 1, 0, 1]], [[0, 0, 1, 1]]
    where = blocks_of(_prediction(slot, group), torch.ones(1, 4, dtype=torch.bool), 2)
    tally = Tally(CPU)
    add_by_position(tally, "position_{}", torch.tensor([1.0, 0.0, 1.0, 1.0]), where)
    assert means(tally.reduced()) == {"position_1": 1.0, "position_2": 0.5}
