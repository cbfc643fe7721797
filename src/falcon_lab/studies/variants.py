"""The runs of an experiment's variants, side by side over their seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from falcon_lab.files import write_atomically
from falcon_lab.measure.results import load_results
from falcon_lab.report.history import HISTORY, read_history
from falcon_lab.report.methods import name_of
from falcon_lab.report.tables import NOTHING, Table

FILE = "variants.json"


def tabulate(runs: Sequence[tuple[str, int, Path]], folder: Path) -> str:
    """Collect the figures of finished runs into ``variants.json``; return the table to print.

    Args:
        runs: (variant, seed, run folder) of each.
        folder: where the table is kept.

    Returns:
        One row a figure; for each variant its mean over seeds and its range, and for the later
        variants the mean of the seed-by-seed differences from the first.
    """
    rows = [
        {"variant": name, "seed": seed, "folder": str(path), "figures": figures(path)}
        for name, seed, path in runs
    ]
    write_atomically(folder / FILE, json.dumps(rows, indent=2))
    return format_variants(rows)


def figures(folder: Path) -> dict[str, float]:
    """Return the last validation figures of a run, and each method's τ and speed-up."""
    found: dict[str, float] = {}
    for record in read_history(folder / HISTORY):
        found.update({k: v for k, v in record.items() if k.startswith("val/")})
    results = folder / "results.json"
    methods = load_results(results)["methods"] if results.exists() else {}
    for method, summary in methods.items():
        name = name_of(method, summary)
        if summary.get("tau") is not None:
            found[f"{name}: τ"] = summary["tau"]
        if summary.get("speedup"):
            found[f"{name}: speed-up"] = summary["speedup"]["ratio"]
    return found


def format_variants(rows: Sequence[dict[str, Any]]) -> str:
    """Write the records of ``variants.json`` as a table, a row for every figure."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    keys = dict.fromkeys(key for row in rows for key in row["figures"])
    head = ["", *names, *(f"{name} − {names[0]}" for name in names[1:])]
    table = []
    for key in keys:
        values = {name: by_seed(rows, name, key) for name in names}
        cells = [spread(values[name].values()) for name in names]
        cells += [difference(values[names[0]], values[name]) for name in names[1:]]
        table.append([key, *cells])
    return Table.of(head, table).text()


def by_seed(rows: Sequence[dict[str, Any]], name: str, key: str) -> dict[int, float]:
    """Return a figure of one variant by seed."""
    return {
        row["seed"]: row["figures"][key]
        for row in rows
        if row["variant"] == name and key in row["figures"]
    }


def spread(values: Iterable[float]) -> str:
    """Write mean and range."""
    known = list(values)
    if not known:
        return NOTHING
    return f"{mean(known):.3f} [{min(known):.3f}, {max(known):.3f}]"


def difference(base: dict[int, float], other: dict[int, float]) -> str:
    """Write mean and range of the differences, seed by seed."""
    gaps = [other[seed] - base[seed] for seed in base if seed in other]
    if not gaps:
        return NOTHING
    return f"{mean(gaps):+.3f} [{min(gaps):+.3f}, {max(gaps):+.3f}]"
