"""The curves of ``scaling.py`` as a picture: what was measured, and the straight line beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.reporting.plots import COLOURS, STYLE
from falcon_lab.whole_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "nodes": "nodes of a tree, rows of new blocks",
    "context": "positions before",
    "batch": "sequences",
    "vocabulary": "entries of the vocabulary",
}
SPREAD = 64
"""Largest over smallest size from which both scales are logarithmic: else most points are one."""


def write_plot(path: Path, results: Mapping[str, Any]) -> Path:
    """A PNG with one panel for everything that grows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    along = list(dict.fromkeys(curve["along"] for curve in results["curves"]))
    colours = dict(
        zip(dict.fromkeys(curve["what"] for curve in results["curves"]), COLOURS, strict=False)
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6 * -(-len(along) // 2)), layout="constrained", dpi=110)
        panels = figure.subplots(-(-len(along) // 2), 2, squeeze=False).flat
        for panel, name in zip(panels, along, strict=False):
            found = [curve for curve in results["curves"] if curve["along"] == name]
            for curve in found:
                _curve(panel, curve, colours[curve["what"]])
            _dress(panel, name, [point["size"] for curve in found for point in curve["points"]])
        for panel in list(panels):
            panel.set_visible(False)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})
    return path


def _curve(axis: Axes, curve: Mapping[str, Any], colour: str) -> None:
    points, line = curve["points"], curve["line"]
    sizes = [point["size"] for point in points]
    middle = [1000 * point["seconds"] for point in points]
    spread = [
        [1000 * (point["seconds"] - point["low"]) for point in points],
        [1000 * (point["high"] - point["seconds"]) for point in points],
    ]
    label = (
        f"{curve['what']}: {1000 * line['intercept']:.3g} ms + {_micro(line['slope'])} µs each"
        f" (± {100 * line['deviation']:.0f} %)"
    )
    axis.errorbar(
        sizes, middle, yerr=spread, fmt="o", markersize=4, color=colour, linewidth=1, label=label
    )
    smooth = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    fitted = [1000 * (line["intercept"] + line["slope"] * size) for size in smooth]
    axis.plot(smooth, fitted, color=colour, linestyle="--", linewidth=1.2)


def _micro(seconds: float) -> str:
    """Microseconds with two figures, never as a power of ten."""
    return f"{1e6 * seconds:.0f}" if seconds >= 1e-5 else f"{1e6 * seconds:.2g}"


def _dress(axis: Axes, name: str, sizes: list[int]) -> None:
    axis.set_title(f"Along the {name}")
    axis.set_xlabel(AXES.get(name, name))
    axis.set_ylabel("ms a pass")
    if max(sizes) >= SPREAD * min(sizes):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted(set(sizes))
        axis.set_xticks(ticks, [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks])
        axis.minorticks_off()
    else:
        axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", fontsize=8)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * (2.5 if axis.get_yscale() == "log" else 1.35))
