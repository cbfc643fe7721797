"""The figures of a comparison: a head with a budget over all its seeds, and heads side by side.

Shapes: S training seeds, P prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from falcon_lab.measure import metrics
from falcon_lab.measure.records import Record
from falcon_lab.measure.statistics import Interval, resampled, time_per_token_ratio
from falcon_lab.studies.compare.contestants import Cell
from falcon_lab.studies.compare.measuring import Measured

Sums = NDArray[np.float64]
"""``[5, …]``: seconds, new tokens, tokens emitted in rounds, rounds, draft tokens accepted."""


def sums(by_seed: Sequence[Sequence[Record]]) -> Sums:
    """``[5, S, P]`` of the rows of every seed."""
    return np.array(
        [[_figures(row) for row in rows] for rows in by_seed], dtype=np.float64
    ).transpose(2, 0, 1)


def _figures(row: Record) -> tuple[float, ...]:
    rounds = row.rounds
    emitted, accepted = sum(rounds.emitted), sum(rounds.accepted)
    return (row.times.wall, len(row.tokens), emitted, len(rounds), accepted)


def tau(table: Sums) -> Sums:
    """Tokens emitted a round, the target's own counted."""
    return np.asarray(table[2] / table[3])


def tau_draft(table: Sums) -> Sums:
    """Draft tokens accepted a round."""
    return np.asarray(table[4] / table[3])


def alpha(table: Sums) -> Sums:
    """Share of the output that the drafter wrote."""
    return np.asarray(table[4] / (table[4] + table[3]))


def faster(table: Sums, than: Sums) -> Sums:
    """How much faster the first is than the second."""
    return time_per_token_ratio(than[:2], table[:2])


def round_steps(table: Sums, plain: Sums) -> Sums:
    """Time of a round in steps of plain decoding: what its tokens have to make up for."""
    return np.asarray((table[0] / table[3]) / (plain[0] / plain[1]))


RATIOS: dict[str, Callable[[Sums, Sums], Sums]] = {
    "speedup": faster,
    "tau": lambda a, b: tau(a) / tau(b),
    "tau_draft": lambda a, b: tau_draft(a) / tau_draft(b),
    "alpha": lambda a, b: alpha(a) / alpha(b),
}
"""Metric -> by how much the first of two heads has more of it."""

VALUES: dict[str, Callable[[Sums], Sums]] = {"tau": tau, "tau_draft": tau_draft, "alpha": alpha}
"""Metric -> its value; a speed-up needs plain decoding beside it."""


def by_budget(measured: Measured) -> dict[tuple[str, str], list[Cell]]:
    """(Head, budget) -> its engines, one a seed."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in measured.rows:
        found.setdefault((cell.head, cell.budget), []).append(cell)
    return found


def tables(measured: Measured) -> dict[tuple[str, str], Sums]:
    """(Head, budget) -> ``[5, S, P]``."""
    return {
        at: sums([measured.rows[cell] for cell in cells])
        for at, cells in by_budget(measured).items()
    }


def rows(measured: Measured) -> list[dict[str, Any]]:
    """A row of the comparison for every head and budget."""
    plain = sums([measured.plain])
    return [
        _row(measured, head, budget, cells, plain)
        for (head, budget), cells in by_budget(measured).items()
    ]


def _row(
    measured: Measured, head: str, budget: str, cells: Sequence[Cell], plain: Sums
) -> dict[str, Any]:
    of_seeds = [measured.rows[cell] for cell in cells]
    everything = [row for of_seed in of_seeds for row in of_seed]
    summary = metrics.summarise(everything, None, lossless=measured.lossless[cells[0]])
    table = sums(of_seeds)
    drafts = summary.tau is not None
    intervals = {
        name: asdict(resampled(value, table)) if drafts else None for name, value in VALUES.items()
    }
    kept = asdict(summary) | {"prompts": table.shape[2]}
    for name in ("method", "speedup"):
        kept.pop(name)
    return {
        "head": head,
        "budget": budget,
        "temperature": measured.temperature,
        "seeds": [cell.seed for cell in cells],
        "speedup": asdict(resampled(faster, table, plain)),
        **kept,
        "intervals": intervals,
        "round_steps": float(round_steps(whole(table), whole(plain))) if drafts else None,
        "peak_bytes": next((p for c in cells if (p := measured.peaks.get(c)) is not None), None),
        "by_seed": {
            cell.seed: _of_seed(table[:, [place]], plain, drafts)
            for place, cell in enumerate(cells)
        },
    }


def whole(table: Sums) -> Sums:
    """``[5]``: over all seeds and prompts."""
    return np.asarray(table.sum(axis=(1, 2)))


def _of_seed(table: Sums, plain: Sums, drafts: bool) -> dict[str, float | None]:
    all_of_it = whole(table)
    found: dict[str, float | None] = {"speedup": float(faster(all_of_it, whole(plain)))}
    return found | {n: float(value(all_of_it)) if drafts else None for n, value in VALUES.items()}


def pairs(measured: Measured) -> list[dict[str, Any]]:
    """Every two heads with the same budget: how much faster the faster one is."""
    found = []
    of = tables(measured)
    for (first, a), (second, b) in combinations(of, 2):
        if a != b:
            continue
        interval = resampled(faster, of[first, a], of[second, b])
        if interval.ratio < 1:
            first, second = second, first
            interval = resampled(faster, of[first, a], of[second, b])
        found.append(_pair(measured.temperature, a, first, second, interval))
    return found


def _pair(
    temperature: float, budget: str, head: str, than: str, interval: Interval
) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "budget": budget,
        "head": head,
        "than": than,
        "speedup": asdict(interval),
        "faster": interval.above_one,
    }


def yardstick(measured: Measured) -> dict[str, Any]:
    """Plain decoding's own figures."""
    found = asdict(metrics.summarise(measured.plain, None, lossless=True))
    return {"temperature": measured.temperature, **found}
