"""Speed-up against what a round verifies, or what it costs, for every head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from falcon_lab.comparing.budgets import BEST
from falcon_lab.comparing.table import named
from falcon_lab.reporting.plots import COLOURS, INK, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NODES = ("nodes_per_round", "draft tokens verified per round")
ROUND = ("round_steps", "time of a round, in steps of plain decoding")
"""Figure of a row -> what an axis calls it."""

STYLES = ("-", "--", ":")
"""A head beyond the last colour has the next style."""


def speed_against(what: tuple[str, str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A panel for every temperature; a line for every head, its best budget as a star.

    Args:
        what: ``NODES`` or ``ROUND``.
        rows: of the results.
    """
    figure_of, label = what
    drafting = [row for row in rows if row[figure_of] is not None]
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
                look = COLOURS[place % len(COLOURS)], STYLES[place // len(COLOURS) % 3]
                _line(axis, figure_of, at, *look)
            axis.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            if what is NODES:
                axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
            axis.set_xlabel(label)
        axes[0].set_ylabel("speed-up over plain decoding")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")

    return draw(5 * len(temperatures) + 2, 4, paint, figure_of)


def _line(
    axis: Axes, figure_of: str, rows: Sequence[Mapping[str, Any]], colour: str, style: str
) -> None:
    if not rows:
        return
    label = named(rows[0]["head"], rows[0]["lossless"])
    points = sorted((row for row in rows if row["budget"] != BEST), key=lambda row: row[figure_of])
    axis.plot(
        [row[figure_of] for row in points],
        [row["speedup"]["ratio"] for row in points],
        color=colour,
        linestyle=style,
        marker="o",
        markersize=4,
        label=label,
    )
    known = [row for row in points if row["speedup"]["low"] is not None]
    axis.fill_between(
        [row[figure_of] for row in known],
        [row["speedup"]["low"] for row in known],
        [row["speedup"]["high"] for row in known],
        color=colour,
        alpha=0.12,
        linewidth=0,
    )
    for row in rows:
        if row["budget"] == BEST:
            axis.plot(
                row[figure_of],
                row["speedup"]["ratio"],
                color=colour,
                marker="*",
                markersize=11,
                linestyle="",
                label=None if points else label,
            )
