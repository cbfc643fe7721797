"""Speed-up against the nodes that the target verifies in a round, for every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from falcon_lab.comparing.budgets import BEST
from falcon_lab.comparing.table import named
from falcon_lab.reporting.plots import COLOURS, INK, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("-", "--", ":")
"""A head beyond the last colour has the next style."""


def speed_against_nodes(rows: Sequence[Mapping[str, Any]]) -> str:
    """A panel for every temperature; a line for every head, its best budget as a star.

    Args:
        rows: of the results.
    """
    drafting = [row for row in rows if row["nodes_per_round"] is not None]
    temperatures = sorted({row["temperature"] for row in drafting})
    if not drafting:
        return ""
    heads = list(dict.fromkeys(row["head"] for row in rows))

    def paint(figure: Figure) -> None:
        axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
        for axis, temperature in zip(axes, temperatures, strict=True):
            for place, head in enumerate(heads):
                of_head = [r for r in drafting if r["head"] == head]
                at = [r for r in of_head if r["temperature"] == temperature]
                _line(axis, at, COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % 3])
            axis.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            axis.set_xscale("symlog", base=2, linthresh=1)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
            axis.set_xlabel("draft tokens verified per round")
        axes[0].set_ylabel("speed-up over plain decoding")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")

    return draw(5 * len(temperatures) + 2, 4, paint, "nodes")


def _line(axis: Axes, rows: Sequence[Mapping[str, Any]], colour: str, style: str) -> None:
    if not rows:
        return
    label = named(rows[0]["head"], rows[0]["lossless"])
    points = sorted(
        (row for row in rows if row["budget"] != BEST), key=lambda row: row["nodes_per_round"]
    )
    nodes = [row["nodes_per_round"] for row in points]
    axis.plot(
        nodes,
        [row["speedup"]["ratio"] for row in points],
        color=colour,
        linestyle=style,
        marker="o",
        markersize=4,
        label=label,
    )
    known = [row for row in points if row["speedup"]["low"] is not None]
    axis.fill_between(
        [row["nodes_per_round"] for row in known],
        [row["speedup"]["low"] for row in known],
        [row["speedup"]["high"] for row in known],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )
    for row in rows:
        if row["budget"] == BEST:
            axis.plot(
                row["nodes_per_round"],
                row["speedup"]["ratio"],
                color=colour,
                marker="*",
                markersize=11,
                linestyle="",
                label=None if points else label,
            )
