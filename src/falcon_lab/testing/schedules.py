"""The check of a glancing schedule.

Shapes: B batch, R prediction rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import BuildContext, GlanceRows, GlancingSchedule
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

DRAWS = 64
"""Glances whose mean is compared with λ·d."""


def check_schedule(schedule: Recipe, *, seed: int = 0) -> None:
    """Check that a glancing schedule does what its kind requires, for blocks of one, two and four.

    - ``token_source`` and ``keep_revealed_in_loss`` are what the training reads.
    - The ratio λ lies in [0, 1] all through the training.
    - What it shows are rows that count, in each sequence never more than the d that were wrong,
      and λ·d of them on average or fewer; with λ = 0, nothing.
    - Rows that it leaves to the loss (``counts``) are rows that count.
    - The generator alone draws, and what it is given stays as it is.

    Args:
        schedule: a YAML node, or what builds a schedule from a ``BuildContext``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("schedule", schedule, seed)
    target = tiny_target()
    for block in (1, 2, 4):
        made = tested.build(BuildContext(target, block))
        with tested.checking(f"ratios and glances for blocks of {block}"):
            check_declarations(tested, made)
            check_ratios(tested, made)
            for number, rows in enumerate(random_rows(tested, block)):
                check_glances(tested, made, rows, number)


def check_declarations(tested: ComponentUnderTest, schedule: Any) -> None:
    """Check the attributes that training reads."""
    source = schedule.token_source
    tested.expect(
        source in ("target", "data"),
        "token_source",
        expected="'target' or 'data'",
        found=repr(source),
        fix="say whose tokens are shown",
    )
    keep = schedule.keep_revealed_in_loss
    tested.expect(
        isinstance(keep, bool),
        "keep_revealed_in_loss",
        expected="True or False",
        found=repr(keep),
        fix="say whether rows that were shown count",
    )


def check_ratios(tested: ComponentUnderTest, schedule: Any) -> None:
    """Check λ from the first step to the last."""
    for step in range(21):
        ratio = schedule.ratio(step / 20)
        tested.expect(
            isinstance(ratio, float | int) and 0.0 <= ratio <= 1.0,
            f"ratio({step / 20:g})",
            expected="a number in [0, 1]",
            found=repr(ratio),
            fix="it is a share of the rows that are wrong",
        )


def random_rows(tested: ComponentUnderTest, block: int) -> list[GlanceRows]:
    """Make blocks of three sequences each: some wrong, all wrong, none wrong, none that counts."""
    generator = tested.generator(95)
    count = 12
    slot = torch.arange(block).repeat(count).expand(3, -1)
    group = torch.arange(count).repeat_interleave(block).expand(3, -1)
    draws = torch.rand(2, *slot.shape, generator=generator)
    valid = draws[0] < 0.9
    valid[1] = True
    found = [
        (draws[1] < 0.5, valid),
        (torch.ones_like(valid), valid),
        (torch.zeros_like(valid), valid),
        (torch.zeros_like(valid), torch.zeros_like(valid)),
    ]
    return [GlanceRows(wrong & counts, counts, slot, group, block) for wrong, counts in found]


def check_glances(tested: ComponentUnderTest, schedule: Any, rows: GlanceRows, number: int) -> None:
    """Check many glances at the same rows."""
    wrong = rows.wrong.sum(1)
    before = [_clone(rows, name) for name in ("wrong", "valid", "slot", "group")]
    for ratio in (0.0, 0.3, 1.0):
        total = torch.zeros(rows.wrong.shape[0])
        for draw in range(DRAWS):
            shown = _reveal(tested, schedule, rows, ratio, 100 * number + draw)
            total += shown.sum(1)
            tested.expect(
                bool((shown.sum(1) <= wrong).all()) and (ratio > 0 or not bool(shown.any())),
                f"rows shown at λ = {ratio:g}",
                expected=f"at most the rows that were wrong, {wrong.tolist()}, and none at λ = 0",
                found=shown.sum(1).tolist(),
                fix="show N = λ·d rows, d being the number of wrong ones in the sequence",
            )
        # Rounding to whole rows may add half a row; a draw for each row spreads the mean.
        spread = 4 * (ratio * (1 - ratio) * wrong / DRAWS).sqrt()
        most = ratio * wrong + 0.5 + spread
        tested.expect(
            bool((total / DRAWS <= most + 1e-6).all()),
            f"rows shown on average at λ = {ratio:g}",
            expected=f"at most λ·d = {(ratio * wrong).tolist()}",
            found=(total / DRAWS).tolist(),
            fix="show N = λ·d rows, d being the number of wrong ones in the sequence",
        )
    if schedule.chooses_rows:
        _check_counts(tested, schedule, rows)
    same = all(
        torch.equal(old, getattr(rows, name))
        for old, name in zip(before, ("wrong", "valid", "slot", "group"), strict=True)
    )
    tested.expect(
        same,
        "the rows that it is given",
        expected="left as they are",
        found="changed in place",
        fix="clone what you want to change",
    )


def _check_counts(tested: ComponentUnderTest, schedule: GlancingSchedule, rows: GlanceRows) -> None:
    counts = schedule.counts(rows)
    tested.expect(
        counts.dtype == torch.bool
        and counts.shape == rows.valid.shape
        and not bool((counts & ~rows.valid).any()),
        "counts()",
        expected=f"[B, R] = {list(rows.valid.shape)} bool, of valid rows alone",
        found=f"{list(counts.shape)} ({counts.dtype}), others among them",
        fix="take the mask with rows.valid",
    )


def _clone(rows: GlanceRows, name: str) -> Tensor:
    value: Tensor = getattr(rows, name)
    return value.clone()


def _reveal(
    tested: ComponentUnderTest, schedule: Any, rows: GlanceRows, ratio: float, number: int
) -> Tensor:
    shown, again = (schedule.reveal(rows, ratio, tested.generator(700 + number)) for _ in range(2))
    tested.expect(
        shown.dtype == torch.bool and shown.shape == rows.valid.shape,
        "reveal()",
        expected=f"[B, R] = {list(rows.valid.shape)} bool",
        found=f"{list(shown.shape)} ({shown.dtype})",
        fix="give a mask over the rows",
    )
    tested.expect(
        not bool((shown & ~rows.valid).any()),
        "rows that are shown",
        expected="rows that count (valid)",
        found=f"{int((shown & ~rows.valid).sum())} that do not",
        fix="take the mask with rows.valid",
    )
    tested.expect(
        torch.equal(shown, again),
        "two glances from one state of the generator",
        expected="the same rows",
        found="other ones",
        fix="draw from the generator that is given, never from torch's global one",
    )
    result: Tensor = shown
    return result
