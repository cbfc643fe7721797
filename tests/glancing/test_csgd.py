from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab import fields
from falcon_lab.errors import ConfigError
from falcon_lab.glancing import Csgd
from falcon_lab.interfaces import BuildContext, GlanceRows
from falcon_lab.plugins.builtins import CsgdConfig


def _schedule(**options: Any) -> Csgd:
    host: Any = None
    return Csgd(CsgdConfig(**options), BuildContext(host))


def _rows(batch: int, blocks: int, block: int, *, wrong: float = 0.5, seed: int = 0) -> GlanceRows:
    """Whole blocks of valid rows; group numbers are neither dense nor alike in the sequences."""
    shape = (batch, blocks * block)
    generator = torch.Generator().manual_seed(seed)
    slot = (torch.arange(shape[1]) % block).expand(shape)
    group = torch.arange(shape[1]).div(block, rounding_mode="floor") * 3
    offset = 100 * torch.arange(batch).unsqueeze(1)
    missed = torch.rand(shape, generator=generator) < wrong
    return GlanceRows(missed, torch.ones(shape, dtype=torch.bool), slot, group + offset, block)


def _reveal(rows: GlanceRows, ratio: float, seed: int = 0) -> Tensor:
    return _schedule().reveal(rows, ratio, torch.Generator().manual_seed(seed))


def _prefix_lengths(mask: Tensor, rows: GlanceRows) -> list[int]:
    """Rows shown of every block, having checked that they are its first ones."""
    lengths = []
    for sequence in range(mask.shape[0]):
        for group in rows.group[sequence].unique():
            inside = rows.group[sequence] == group
            slots = rows.slot[sequence][inside & mask[sequence]].tolist()
            assert sorted(slots) == list(range(len(slots)))
            lengths.append(len(slots))
    return lengths


def test_the_ratio_falls_in_a_straight_line() -> None:
    paper, upstream = _schedule(), _schedule(start=0.45, end=0.1)
    assert [paper.ratio(p) for p in (0, 0.5, 1)] == pytest.approx([0.4, 0.2, 0.0])
    assert [upstream.ratio(p) for p in (0, 0.5, 1)] == pytest.approx([0.45, 0.275, 0.1])
    assert (paper.ratio(-1), paper.ratio(2)) == (paper.ratio(0), paper.ratio(1))


def test_with_blocks_of_one_there_is_nothing_to_glance_at() -> None:
    host: Any = None
    assert Csgd(CsgdConfig(), BuildContext(host, block=1)).ratio(0.0) == 0
    assert not _reveal(_rows(2, 8, 1), 1.0).any()


@pytest.mark.parametrize("block", [2, 3, 4])
@pytest.mark.parametrize("ratio", [0.1, 0.4, 1.0])
def test_prefixes_of_whole_blocks_are_shown_and_never_the_last_row(
    block: int, ratio: float
) -> None:
    rows = _rows(4, 12, block)
    for seed in range(5):
        mask = _reveal(rows, ratio, seed)
        assert not mask[rows.slot == block - 1].any()
        assert max(_prefix_lengths(mask, rows)) <= block - 1


def test_every_length_of_prefix_occurs() -> None:
    rows = _rows(4, 50, 4)
    assert set(_prefix_lengths(_reveal(rows, 0.4), rows)) == {0, 1, 2, 3}


@pytest.mark.parametrize("block", [2, 3, 4])
def test_ratio_times_the_wrong_rows_of_each_sequence_are_shown(block: int) -> None:
    rows = _rows(5, 30, block, wrong=0.5)
    wrong = rows.wrong.sum(1)
    for ratio in (0.0, 0.1, 0.25, 0.4):
        shown = _reveal(rows, ratio).sum(1)
        assert torch.equal(shown, (wrong * ratio).round().long())


def test_no_more_is_shown_than_there_are_blocks_for() -> None:
    rows = _rows(3, 10, 2, wrong=1.1)  # every row is wrong, half of them can be shown
    assert _reveal(rows, 1.0).sum(1).tolist() == [10, 10, 10]


def test_a_sequence_that_is_right_is_shown_nothing_beside_one_that_is_wrong() -> None:
    rows = _rows(2, 20, 3, wrong=1.1)
    wrong = rows.wrong.clone()
    wrong[0] = False
    mask = _reveal(GlanceRows(wrong, rows.valid, rows.slot, rows.group, 3), 0.4)
    assert mask.sum(1).tolist() == [0, 24]


def test_sequences_are_drawn_for_apart_from_each_other() -> None:
    rows = _rows(2, 40, 2, wrong=1.1)
    mask = _reveal(rows, 0.4)
    assert not torch.equal(mask[0], mask[1])


def test_the_generator_decides() -> None:
    rows = _rows(2, 40, 3)
    assert torch.equal(_reveal(rows, 0.4, seed=1), _reveal(rows, 0.4, seed=1))
    assert not torch.equal(_reveal(rows, 0.4, seed=1), _reveal(rows, 0.4, seed=2))


def test_every_block_is_as_likely_as_the_others() -> None:
    rows = _rows(1, 10, 2, wrong=1.1)
    times = sum(_reveal(rows, 0.2, seed)[0, ::2].int() for seed in range(500))
    assert times.sum() == 500 * 4
    assert (times - 200).abs().max() < 60  # 200 ± 11 each


def test_blocks_that_count_only_in_part_are_left_alone() -> None:
    rows = _rows(2, 20, 3, wrong=1.1)
    valid = rows.valid.clone()
    valid[:, ::6] = False  # the first row of every other block
    mask = _reveal(GlanceRows(rows.wrong & valid, valid, rows.slot, rows.group, 3), 1.0)
    broken = torch.arange(60).div(3, rounding_mode="floor") % 2 == 0
    assert not mask[:, broken].any()
    assert mask[:, ~broken].any()


def test_a_batch_without_anything_to_learn_is_shown_nothing() -> None:
    rows = _rows(2, 4, 2)
    nothing = torch.zeros_like(rows.valid)
    assert not _reveal(GlanceRows(nothing, nothing, rows.slot, rows.group, 2), 1.0).any()


def test_the_order_of_rows_does_not_matter() -> None:
    """Rows of a plug-in's prediction may be ordered by slot."""
    rows = _rows(2, 12, 3)
    order = torch.arange(36).view(12, 3).T.flatten()
    shuffled = GlanceRows(
        rows.wrong[:, order], rows.valid[:, order], rows.slot[:, order], rows.group[:, order], 3
    )
    assert torch.equal(_reveal(shuffled, 0.4), _reveal(rows, 0.4)[:, order])


def test_the_switches_are_handed_on() -> None:
    data = _schedule(tokens="data", revealed_in_loss=False)
    assert (data.token_source, data.keep_revealed_in_loss) == ("data", False)
    with pytest.raises(ConfigError, match=r"glancing\.tokens"):
        fields.options(CsgdConfig, {"tokens": "model"}, "glancing")
