"""Plots of tuning, as SVG files: costs, acceptance, and predicted beside measured speed-up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.reporting.plots import BASELINE, COLOURS, draw
from falcon_lab.whole_file import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
"""Ranks that have a line."""


def write_plots(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """``costs.svg``, ``acceptance.svg`` and ``speedups.svg``."""
    written = []
    for name, plot in (("costs", costs), ("acceptance", acceptance), ("speedups", speedups)):
        path = folder / f"{name}.svg"
        with replacing(path) as temporary:
            temporary.write_text(plot(results), encoding="utf-8")
        written.append(path)
    return written


def costs(results: Mapping[str, Any]) -> str:
    """Milliseconds of a target pass by draft tokens."""
    found = results["tune"]["costs"]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        nodes, seconds = zip(*found["verify"], strict=True)
        axis.plot(nodes, [1000 * s for s in seconds], marker="o", color=COLOURS[0], label="verify")
        axis.axhline(1000 * found["step"], color=BASELINE, linestyle="--", label="plain step")
        axis.set_ylim(bottom=0)
        axis.set_title("Cost of a target pass")
        axis.set_xlabel("draft tokens")
        axis.set_ylabel("ms")
        axis.legend()

    return draw(6, 3, paint, "tune-costs")


def acceptance(results: Mapping[str, Any]) -> str:
    """Acceptance by depth, a line for each of the first ranks; given that the path is right."""
    tables = results["tune"]["acceptance"]

    def paint(figure: Figure) -> None:
        panels = {"path right": "any", "path of first candidates": "first"}
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (title, key) in zip(axes, panels.items(), strict=True):
            depths = [row["depth"] for row in tables[key]]
            for rank in range(SHOWN):
                shares = [100 * row["ranks"][rank] for row in tables[key]]
                axis.plot(depths, shares, marker="o", color=COLOURS[rank], label=f"rank {rank}")
            axis.set_title(title)
            axis.set_xlabel("depth")
        axes[0].set_ylabel("accepted, %")
        axes[1].legend()

    return draw(9, 3, paint, "tune-acceptance")


def speedups(results: Mapping[str, Any]) -> str:
    """Predicted and measured speed-up of every tree."""
    predicted = results["tune"]["predicted"]
    names = list(predicted)[::-1]
    measured = [results["methods"][name]["speedup"] for name in names]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        places = range(len(names))
        axis.plot(
            [predicted[name]["speedup"]["ratio"] for name in names],
            places,
            "o",
            color=COLOURS[2],
            label="predicted",
        )
        axis.errorbar(
            [m["ratio"] for m in measured],
            places,
            xerr=[
                [m["ratio"] - (m["low"] or m["ratio"]) for m in measured],
                [(m["high"] or m["ratio"]) - m["ratio"] for m in measured],
            ],
            fmt="s",
            color=COLOURS[0],
            label="measured, 95 %",
        )
        axis.set_yticks(places, names)
        axis.set_xlabel("speed-up over plain decoding")
        axis.legend()

    return draw(7, 0.35 * len(names) + 1, paint, "tune-speedups")
