"""The glancing schedules."""

from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab import fields
from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.glancing import Csgd, NoGlancing, RandomGlancing, ValidPrefix
from falcon_lab.interfaces import BuildContext, GlanceRows
from falcon_lab.plugins.builtins import CsgdConfig, RandomConfig, ValidPrefixConfig
from falcon_lab.plugins.discovery import load_components

# --- csgd -------------------------------------------------------------------------------------


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


# --- random -----------------------------------------------------------------------------------


HOST: Any = None


def _schedule_of_random(block: int = 0, **options: Any) -> RandomGlancing:
    return RandomGlancing(RandomConfig(**options), BuildContext(HOST, block))


def _rows_of_random(batch: int = 3, count: int = 24, block: int = 3, seed: int = 0) -> GlanceRows:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(batch, count, generator=generator) < 0.8
    wrong = valid & (torch.rand(batch, count, generator=generator) < 0.5)
    slot = (torch.arange(count) % block).expand(batch, -1)
    group = torch.arange(count).div(block, rounding_mode="floor").expand(batch, -1)
    return GlanceRows(wrong, valid, slot, group, block)


def _reveal_of_random(rows: GlanceRows, ratio: float, seed: int = 0) -> Tensor:
    return _schedule_of_random().reveal(rows, ratio, torch.Generator().manual_seed(seed))


def _by_sequence(rows: GlanceRows, ratio: float, seed: int) -> Tensor:
    """The description read literally: of the rows that count, those with the least draws."""
    draws = torch.rand(
        rows.valid.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    shown = torch.zeros_like(rows.valid)
    for sequence in range(len(shown)):
        possible = rows.valid[sequence].nonzero().flatten().tolist()
        possible.sort(key=lambda row: float(draws[sequence, row]))
        distance = int(rows.wrong[sequence].sum())
        for row in possible[: round(ratio * distance)]:
            shown[sequence, row] = True
    return shown


@pytest.mark.parametrize("block", [2, 3, 4, 6])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 1.0, 5.0])
def test_it_equals_a_loop_over_sequences(block: int, ratio: float) -> None:
    for seed in range(5):
        rows = _rows_of_random(block=block, seed=seed)
        assert torch.equal(_reveal_of_random(rows, ratio, seed), _by_sequence(rows, ratio, seed))


def test_every_row_that_counts_is_as_likely_as_the_others() -> None:
    rows = _rows_of_random(batch=1)
    wanted = round(0.5 * int(rows.wrong.sum()))
    times = sum(_reveal_of_random(rows, 0.5, seed)[0].int() for seed in range(600))
    expected = 600 * wanted / int(rows.valid.sum())
    assert (times[~rows.valid[0]] == 0).all()
    assert (times[rows.valid[0]] - expected).abs().max() < 0.25 * expected


def test_the_ratio_is_glat_s_and_nothing_is_shown_to_blocks_of_one() -> None:
    assert [_schedule_of_random().ratio(p) for p in (0, 0.5, 1)] == pytest.approx([0.5, 0.4, 0.3])
    assert _schedule_of_random(block=1).ratio(0.0) == 0.0
    assert not _reveal_of_random(_rows_of_random(block=1), 1.0).any()


def test_the_switches_of_random_are_handed_on() -> None:
    assert (_schedule_of_random().token_source, _schedule_of_random().keep_revealed_in_loss) == (
        "target",
        False,
    )
    data = _schedule_of_random(tokens="data", revealed_in_loss=True)
    assert (data.token_source, data.keep_revealed_in_loss) == ("data", True)


# --- none -------------------------------------------------------------------------------------


def test_nothing_is_ever_shown() -> None:
    host: Any = None
    schedule = NoGlancing(None, BuildContext(host))
    yes = torch.ones(2, 6, dtype=torch.bool)
    slot = torch.arange(6).expand(2, 6) % 2
    group = torch.arange(6).expand(2, 6).div(2, rounding_mode="floor")
    assert schedule.ratio(0.0) == schedule.ratio(1.0) == 0.0
    assert not schedule.reveal(GlanceRows(yes, yes, slot, group, 2), 1.0, torch.Generator()).any()


# --- valid prefix -----------------------------------------------------------------------------


def _schedule_of_valid_prefix(**inner: Any) -> Any:
    node = {"name": "valid_prefix", "schedule": {"name": "none", **inner}}
    return load_components().build("schedule", node, BuildContext(HOST, 3))


def _rows_of_valid_prefix(block: int, seed: int = 0) -> GlanceRows:
    """Blocks in a random order of rows; group numbers are neither dense nor alike."""
    generator = torch.Generator().manual_seed(seed)
    count = 8 * block
    order = torch.stack([torch.randperm(count, generator=generator) for _ in range(3)])
    valid = torch.rand(3, count, generator=generator) < 0.8
    wrong = valid & (torch.rand(3, count, generator=generator) < 0.3)
    group = order.div(block, rounding_mode="floor") * 7 - 3
    return GlanceRows(wrong, valid, order % block, group, block)


def _literally(rows: GlanceRows) -> Tensor:
    """A row stays when no row of its block with a lower slot is wrong."""
    kept = rows.valid.clone()
    for b in range(kept.shape[0]):
        for r in range(kept.shape[1]):
            for other in range(kept.shape[1]):
                same = rows.group[b, r] == rows.group[b, other]
                if same and rows.slot[b, other] < rows.slot[b, r] and rows.wrong[b, other]:
                    kept[b, r] = False
    return kept


@pytest.mark.parametrize("block", [1, 2, 3, 4, 7])
def test_it_equals_a_loop_over_pairs_of_rows(block: int) -> None:
    for seed in range(4):
        rows = _rows_of_valid_prefix(block, seed)
        assert torch.equal(_schedule_of_valid_prefix().counts(rows), _literally(rows))


def test_the_first_wrong_row_counts_and_what_follows_it_does_not() -> None:
    wrong = torch.tensor([[False, True, False, True, True, False, False, False]])
    slot, group = torch.arange(8)[None] % 4, torch.arange(8)[None] // 4
    kept = _schedule_of_valid_prefix().counts(
        GlanceRows(wrong, torch.ones_like(wrong), slot, group, 4)
    )
    assert kept.tolist() == [[True, True, False, False, True, False, False, False]]


def test_a_wrong_row_that_does_not_count_hides_nothing() -> None:
    wrong = torch.tensor([[True, False]])
    valid = torch.tensor([[False, True]])
    slot, group = torch.arange(2)[None], torch.zeros(1, 2, dtype=torch.long)
    kept = _schedule_of_valid_prefix().counts(GlanceRows(wrong, valid, slot, group, 2))
    assert torch.equal(kept, valid)


def test_the_glances_are_those_of_the_schedule_within() -> None:
    rows, inside = (
        _rows_of_valid_prefix(3),
        {"name": "csgd", "start": 0.8, "revealed_in_loss": False},
    )
    alone = load_components().build("schedule", inside, BuildContext(HOST, 3))
    wrapped = _schedule_of_valid_prefix(**inside)
    assert wrapped.chooses_rows
    assert not alone.chooses_rows
    assert torch.equal(alone.counts(rows), rows.valid)
    assert wrapped.ratio(0.25) == alone.ratio(0.25)
    assert (wrapped.token_source, wrapped.keep_revealed_in_loss) == ("target", False)
    shown = [s.reveal(rows, 0.4, torch.Generator().manual_seed(1)) for s in (wrapped, alone)]
    assert torch.equal(*shown)
    assert shown[0].any()


def test_two_masks_leave_what_both_leave() -> None:
    rows = _rows_of_valid_prefix(3)
    twice = _schedule_of_valid_prefix(name="valid_prefix", schedule={"name": "none"})
    assert torch.equal(twice.counts(rows), _schedule_of_valid_prefix().counts(rows))


def test_the_node_within_is_checked_before_anything_runs() -> None:
    components = load_components()
    node = {"name": "valid_prefix", "schedule": {"name": "csgd", "start": 0.3}}
    full = components.check("schedule", node, "glancing")
    assert full["schedule"] == {
        "name": "csgd",
        "start": 0.3,
        "end": 0.0,
        "tokens": "target",
        "revealed_in_loss": True,
    }
    node["schedule"] = {"name": "csgd", "begin": 0.3}
    with pytest.raises(ConfigError) as caught:
        components.check("schedule", node, "glancing")
    assert caught.value.key == "glancing.schedule.begin"


def test_without_a_registry_it_says_what_is_missing() -> None:
    with pytest.raises(FalconLabError, match="registry"):
        ValidPrefix(ValidPrefixConfig(), BuildContext(HOST, 3))
