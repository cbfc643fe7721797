"""The measurements of ``gpu_shape.py`` as aligned plain text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from falcon_lab.benchmarking.gpu_shape import EAGER, GRAPHS
from falcon_lab.benchmarking.methods import HF, METHODS
from falcon_lab.evaluation.table import NOTHING, align, number

LOOPS = ("loop", "ms/token", "tok/s", "of floor %", "over HF", "overhead %")
PASSES = ("rows", "graphs ms", "× one row", "eager ms", "× one row", "floor ms")
ASSUMED = (
    "drafts a round (assumed)",
    "tok/s",
    "over plain",
    "τ",
    "draft",
    "verify",
    "accept",
    "commit",
    "other ms",
    "overhead %",
    "drafter pass, % of the target's",
)


def format_shape(results: Mapping[str, Any]) -> str:
    """Three tables for every context, and what the machine is.

    Args:
        results: of ``bench_shape``.
    """
    machine, hardware = results["machine"], results["hardware"]
    blocks = [
        f"{hardware['gpu'] or hardware['cpu']}: {machine['bytes_per_second'] / 1e9:.0f} GB/s in "
        f"copies, {machine['operations_per_second'] / 1e12:.1f} TFLOP/s; "
        f"{results['cost']['weight_bytes'] / 1e9:.2f} GB of weights, random"
    ]
    for found in results["contexts"]:
        blocks += [f"context {found['context']}", _loops(found), _passes(found), _assumed(found)]
        blocks += [f"left out: {name} ({why})" for name, why in found["left_out"].items()]
    return "\n\n".join([*blocks, *results["notes"]])


def _loops(found: Mapping[str, Any]) -> str:
    theirs = found["loops"].get(METHODS[HF])
    rows = [
        (
            name,
            number(1000 * rate["seconds"], 3),
            number(rate["tokens_per_second"], 1),
            number(100 * rate["floor_reached"], 1),
            f"{theirs['seconds'] / rate['seconds']:.2f}×" if theirs else NOTHING,
            number(rate["overhead"], 1),
        )
        for name, rate in found["loops"].items()
    ]
    return align([LOOPS, *rows])


def _passes(found: Mapping[str, Any]) -> str:
    rows = [
        (
            str(row["nodes"]),
            number(row["graphs"], 3),
            f"{row['graphs_over_one']:.2f}",
            number(row["eager"], 3),
            f"{row['eager_over_one']:.2f}",
            number(row["floor"], 3),
        )
        for row in found["passes"]
    ]
    return align([PASSES, *rows])


def _assumed(found: Mapping[str, Any]) -> str:
    rows = []
    for row in found["assumed"]:
        split = [number(1000 * seconds, 3) for seconds in row["round"].values()]
        rows.append(
            (
                f"{row['drafts']:.2f} ({row['source']})",
                number(row["tokens_per_second"], 1),
                f"{row['over_plain']:.2f}×",
                number(row["tau"], 2),
                *split,
                number(row["overhead"], 1),
                number(row["draft_pass_share"], 1),
            )
        )
    return align([ASSUMED, *rows])


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """What is hoped for, and what was found, line by line."""
    lines = []
    for found in results["contexts"]:
        loops, where = found["loops"], f"context {found['context']}"
        reached = loops[GRAPHS]["floor_reached"]
        lines.append(
            _verdict(f"{where}: {100 * reached:.1f} % of the floor", reached >= 0.85, "85")
        )
        others = {n: r["seconds"] for n, r in loops.items() if n not in (GRAPHS, EAGER)}
        best = min(others, key=lambda name: others[name], default=None)
        if best is not None:
            ratio = others[best] / loops[GRAPHS]["seconds"]
            lines.append(_verdict(f"{where}: {ratio:.2f}× {best}", ratio > 1, "more than 1"))
        last = found["passes"][-1]
        over = last["graphs_over_one"]
        lines.append(
            _verdict(f"{where}: {last['nodes']} rows in {over:.2f}× one", over <= 1.15, "1.15")
        )
        worst = max((row["overhead"] for row in found["assumed"]), default=None)
        if worst is not None:
            lines.append(_verdict(f"{where}: overhead {worst:.1f} % of a round", worst <= 5, "5"))
    return lines


def _verdict(found: str, good: bool, wanted: str) -> str:
    return f"{'yes' if good else 'NO '} {found} (wanted: {wanted})"
