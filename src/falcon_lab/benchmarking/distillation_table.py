"""A benchmark of training as aligned plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from falcon_lab.evaluation.table import NOTHING, align

SPEED = (
    "loop",
    "ms a step",
    "CPU ms",
    "tok/s studied",
    "ours is",
    "utilisation %",
    "loss differs by",
)
MEMORY = ("way", "V", "H", "B x T", "growth MiB", "s", "loss")
MIB = 2**20


def format_speed(results: Mapping[str, Any]) -> str:
    """The table of ``bench_distillation``'s results."""
    rows = [
        (
            name,
            f"{1000 * loop['seconds_per_step']:.0f}",
            f"{1000 * loop['cpu_seconds_per_step']:.0f}",
            f"{loop['tokens_per_second']:.0f}",
            f"{loop['ours_is_faster']:.2f}×",
            f"{100 * loop['utilisation']:.1f}",
            f"{loop['loss_difference']:.1e}",
        )
        for name, loop in results["loops"].items()
    ]
    whole = sum(results["parts"].values())
    parts = ", ".join(f"{n} {100 * s / whole:.1f} %" for n, s in results["parts"].items())
    machine = results["machine"]
    notes = [
        f"{results['steps']} steps. Ours: {parts}.",
        f"{results['cost']['total'] / 1e9:.1f} GFLOP a step at the least; "
        f"{machine['operations_per_second'] / 1e9:.0f} GFLOP/s in a matrix product, "
        f"{results['hardware']['threads']} threads.",
    ]
    return "\n\n".join([align([SPEED, *rows]), "\n".join(notes)])


def format_memory(found: Sequence[Mapping[str, Any]]) -> str:
    """The table of what ``measure_apart`` found."""
    rows = []
    for each in found:
        shape = each["shape"]
        if "error" in each:
            figures: tuple[str, ...] = (NOTHING, NOTHING, each["error"])
        else:
            figures = (
                f"{each['growth'] / MIB:.0f}",
                f"{each['seconds']:.1f}",
                f"{each['loss']:.6f}",
            )
        tokens = str(shape["sequences"] * shape["length"])
        way = "whole" if shape["whole"] else f"{shape['logits_mib']} MiB"
        rows.append((way, str(shape["vocabulary"]), str(shape["hidden"]), tokens, *figures))
    return align([MEMORY, *rows])
