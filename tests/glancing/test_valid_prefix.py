from typing import Any

import pytest
import torch
from torch import Tensor

from falcon_lab.errors import ConfigError, FalconLabError
from falcon_lab.glancing import ValidPrefix
from falcon_lab.interfaces import BuildContext, GlanceRows
from falcon_lab.plugins.builtins import ValidPrefixConfig
from falcon_lab.plugins.discovery import load_components

HOST: Any = None


def _schedule(**inner: Any) -> Any:
    node = {"name": "valid_prefix", "schedule": {"name": "none", **inner}}
    return load_components().build("schedule", node, BuildContext(HOST, 3))


def _rows(block: int, seed: int = 0) -> GlanceRows:
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
        rows = _rows(block, seed)
        assert torch.equal(_schedule().counts(rows), _literally(rows))


def test_the_first_wrong_row_counts_and_what_follows_it_does_not() -> None:
    wrong = torch.tensor([[False, True, False, True, True, False, False, False]])
    slot, group = torch.arange(8)[None] % 4, torch.arange(8)[None] // 4
    kept = _schedule().counts(GlanceRows(wrong, torch.ones_like(wrong), slot, group, 4))
    assert kept.tolist() == [[True, True, False, False, True, False, False, False]]


def test_a_wrong_row_that_does_not_count_hides_nothing() -> None:
    wrong = torch.tensor([[True, False]])
    valid = torch.tensor([[False, True]])
    slot, group = torch.arange(2)[None], torch.zeros(1, 2, dtype=torch.long)
    kept = _schedule().counts(GlanceRows(wrong, valid, slot, group, 2))
    assert torch.equal(kept, valid)


def test_the_glances_are_those_of_the_schedule_within() -> None:
    rows, inside = _rows(3), {"name": "csgd", "start": 0.8, "revealed_in_loss": False}
    alone = load_components().build("schedule", inside, BuildContext(HOST, 3))
    wrapped = _schedule(**inside)
    assert wrapped.chooses_rows
    assert not alone.chooses_rows
    assert torch.equal(alone.counts(rows), rows.valid)
    assert wrapped.ratio(0.25) == alone.ratio(0.25)
    assert (wrapped.token_source, wrapped.keep_revealed_in_loss) == ("target", False)
    shown = [s.reveal(rows, 0.4, torch.Generator().manual_seed(1)) for s in (wrapped, alone)]
    assert torch.equal(*shown)
    assert shown[0].any()


def test_two_masks_leave_what_both_leave() -> None:
    rows = _rows(3)
    twice = _schedule(name="valid_prefix", schedule={"name": "none"})
    assert torch.equal(twice.counts(rows), _schedule().counts(rows))


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
