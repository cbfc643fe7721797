from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.glancing import RandomGlancing
from falcon_lab.interfaces import BuildContext, GlanceRows
from falcon_lab.plugins.builtins import RandomConfig

HOST: Any = None


def _schedule(block: int = 0, **options: Any) -> RandomGlancing:
    return RandomGlancing(RandomConfig(**options), BuildContext(HOST, block))


def _rows(batch: int = 3, count: int = 24, block: int = 3, seed: int = 0) -> GlanceRows:
    generator = torch.Generator().manual_seed(seed)
    valid = torch.rand(batch, count, generator=generator) < 0.8
    wrong = valid & (torch.rand(batch, count, generator=generator) < 0.5)
    slot = (torch.arange(count) % block).expand(batch, -1)
    group = torch.arange(count).div(block, rounding_mode="floor").expand(batch, -1)
    return GlanceRows(wrong, valid, slot, group, block)


def _reveal(rows: GlanceRows, ratio: float, seed: int = 0) -> Tensor:
    return _schedule().reveal(rows, ratio, torch.Generator().manual_seed(seed))


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
        rows = _rows(block=block, seed=seed)
        assert torch.equal(_reveal(rows, ratio, seed), _by_sequence(rows, ratio, seed))


def test_every_row_that_counts_is_as_likely_as_the_others() -> None:
    rows = _rows(batch=1)
    wanted = round(0.5 * int(rows.wrong.sum()))
    times = sum(_reveal(rows, 0.5, seed)[0].int() for seed in range(600))
    expected = 600 * wanted / int(rows.valid.sum())
    assert (times[~rows.valid[0]] == 0).all()
    assert (times[rows.valid[0]] - expected).abs().max() < 0.25 * expected


def test_the_ratio_is_glat_s_and_nothing_is_shown_to_blocks_of_one() -> None:
    assert [_schedule().ratio(p) for p in (0, 0.5, 1)] == pytest.approx([0.5, 0.4, 0.3])
    assert _schedule(block=1).ratio(0.0) == 0.0
    assert not _reveal(_rows(block=1), 1.0).any()


def test_the_switches_are_handed_on() -> None:
    assert (_schedule().token_source, _schedule().keep_revealed_in_loss) == ("target", False)
    data = _schedule(tokens="data", revealed_in_loss=True)
    assert (data.token_source, data.keep_revealed_in_loss) == ("data", True)
