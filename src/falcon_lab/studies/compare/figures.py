"""Compute a comparison's figures: a head with a budget over all its seeds, and heads side by side.

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
from falcon_lab.studies.compare.drafters import EngineKey
from falcon_lab.studies.compare.measuring import Measured

Sums = NDArray[np.float64]
"""``[5, …]``: seconds, new tokens, tokens emitted in rounds, rounds, draft tokens accepted."""


def sums(by_seed: Sequence[Sequence[Record]]) -> Sums:
    """Return ``[5, S, P]`` from the records of every seed."""
    table = [[_figures(record) for record in records] for records in by_seed]
    return np.array(table, dtype=np.float64).transpose(2, 0, 1)


def _figures(record: Record) -> tuple[float, ...]:
    rounds = record.rounds
    emitted, accepted = sum(rounds.emitted), sum(rounds.accepted)
    return (record.times.wall, len(record.tokens), emitted, len(rounds), accepted)


def tau(table: Sums) -> Sums:
    """Return the tokens emitted a round, the target's own counted."""
    return np.asarray(table[2] / table[3])


def tau_draft(table: Sums) -> Sums:
    """Return the draft tokens accepted a round."""
    return np.asarray(table[4] / table[3])


def alpha(table: Sums) -> Sums:
    """Return the share of the output that the drafter wrote."""
    return np.asarray(table[4] / (table[4] + table[3]))


def faster(table: Sums, than: Sums) -> Sums:
    """Return how much faster the first is than the second."""
    return time_per_token_ratio(than[:2], table[:2])


def round_seconds(table: Sums) -> Sums:
    """Return a round's share of the wall time, prefill included."""
    return np.asarray(table[0] / table[3])


def round_steps(table: Sums, plain: Sums) -> Sums:
    """Return a round's time in steps of plain decoding: what its tokens have to make up for."""
    return np.asarray(round_seconds(table) / (plain[0] / plain[1]))


RATIOS: dict[str, Callable[[Sums, Sums], Sums]] = {
    "speedup": faster,
    "tau": lambda a, b: tau(a) / tau(b),
    "tau_draft": lambda a, b: tau_draft(a) / tau_draft(b),
    "alpha": lambda a, b: alpha(a) / alpha(b),
}
"""Metric -> by how much the first of two heads has more of it."""

VALUES: dict[str, Callable[[Sums], Sums]] = {"tau": tau, "tau_draft": tau_draft, "alpha": alpha}
"""Metric -> its value; a speed-up needs plain decoding beside it."""


def by_budget(measured: Measured) -> dict[tuple[str, str], list[EngineKey]]:
    """Group the engines by head and budget; they differ in the seed."""
    found: dict[tuple[str, str], list[EngineKey]] = {}
    for key in measured.records:
        found.setdefault((key.head, key.budget), []).append(key)
    return found


def tables(measured: Measured) -> dict[tuple[str, str], Sums]:
    """Return ``[5, S, P]`` of every head and budget."""
    return {
        at: sums([measured.records[key] for key in keys])
        for at, keys in by_budget(measured).items()
    }


def rows(measured: Measured) -> list[dict[str, Any]]:
    """Return a row of the table for every head and budget."""
    baseline = sums([measured.plain])
    return [
        _row(measured, head, budget, keys, baseline)
        for (head, budget), keys in by_budget(measured).items()
    ]


def _row(
    measured: Measured, head: str, budget: str, keys: Sequence[EngineKey], plain: Sums
) -> dict[str, Any]:
    of_seeds = [measured.records[key] for key in keys]
    everything = [record for of_seed in of_seeds for record in of_seed]
    summary = metrics.summarise(everything, None, lossless=measured.lossless[keys[0]])
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
        "prompt_set": measured.prompt_set,
        "temperature": measured.temperature,
        "seeds": [key.seed for key in keys],
        "speedup": asdict(resampled(faster, table, plain)),
        **kept,
        "intervals": intervals,
        "round_seconds": float(round_seconds(whole(table))) if drafts else None,
        "round_steps": float(round_steps(whole(table), whole(plain))) if drafts else None,
        "peak_bytes": next((p for k in keys if (p := measured.peaks.get(k)) is not None), None),
        "by_seed": {
            key.seed: _of_seed(table[:, [place]], plain, drafts) for place, key in enumerate(keys)
        },
    }


def whole(table: Sums) -> Sums:
    """Sum over all seeds and prompts: ``[5]``."""
    return np.asarray(table.sum(axis=(1, 2)))


def _of_seed(table: Sums, plain: Sums, drafts: bool) -> dict[str, float | None]:
    all_of_it = whole(table)
    found: dict[str, float | None] = {"speedup": float(faster(all_of_it, whole(plain)))}
    return found | {n: float(value(all_of_it)) if drafts else None for n, value in VALUES.items()}


def pairs(measured: Measured) -> list[dict[str, Any]]:
    """Compare every two heads with the same budget: how much faster is the faster one?"""
    found = []
    of = tables(measured)
    for (first, a), (second, b) in combinations(of, 2):
        if a != b:
            continue
        interval = resampled(faster, of[first, a], of[second, b])
        ahead, behind = first, second
        if interval.ratio < 1:
            ahead, behind = second, first
            interval = resampled(faster, of[ahead, a], of[behind, b])
        found.append(_pair(measured, a, ahead, behind, interval))
    return found


def _pair(
    measured: Measured, budget: str, head: str, than: str, interval: Interval
) -> dict[str, Any]:
    return {
        "prompt_set": measured.prompt_set,
        "temperature": measured.temperature,
        "budget": budget,
        "head": head,
        "than": than,
        "speedup": asdict(interval),
        "faster": interval.above_one,
    }


def plain(measured: Measured) -> dict[str, Any]:
    """Return plain decoding's own figures."""
    found = asdict(metrics.summarise(measured.plain, None, lossless=True))
    return {"prompt_set": measured.prompt_set, "temperature": measured.temperature, **found}
