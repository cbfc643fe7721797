"""How the cost of a pass grows with nodes, context, batch and vocabulary, and whether in a line.

All passes of all sizes take turns in one process, so that a slow moment of the machine falls on
every size alike; a figure is the median of its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from falcon_lab.files import write_atomically
from falcon_lab.measure import provenance
from falcon_lab.measure.pass_costs import Sizes, TimedPass, once, timed_passes
from falcon_lab.report.plots import Curve, Panel, colours_of, line_plot
from falcon_lab.report.tables import Column, Table, percent
from falcon_lab.timing import in_turns

if TYPE_CHECKING:
    from falcon_lab.config.schema import Node
    from falcon_lab.model.target import Target
    from falcon_lab.plugins.registry import Components


@dataclass(frozen=True)
class Line:
    """``intercept + slope · size``, in seconds.

    Attributes:
        intercept: what a pass costs before any of what grows.
        slope: what one more of it costs.
        deviation: the largest distance of a measured point from the line, as a share of the point.
    """

    intercept: float
    slope: float
    deviation: float

    @classmethod
    def through(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Line:
        """Fit a line by least squares of relative distances.

        A microsecond matters less where a pass takes a hundred times as long. One size gives a
        flat line.
        """
        x, y = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
        if len(set(sizes)) < 2:
            return cls(float(y.mean()), 0.0, float(np.abs(y / y.mean() - 1).max()))
        table = np.stack([1 / y, x / y], axis=1)
        intercept, slope = np.linalg.lstsq(table, np.ones_like(y), rcond=None)[0]
        off = np.abs((intercept + slope * x) / y - 1).max()
        return cls(float(intercept), float(slope), float(off))


def bench_scaling(
    target: Target,
    components: Components,
    drafter: Node,
    sizes: Sizes,
    *,
    turns: int,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Measure every pass at every size.

    Args:
        target: the model; where it ends too early or has another vocabulary, a model of its shape
            with random weights stands for it.
        components: builds drafters.
        drafter: the drafter's node; its weights are random too, which costs the same.
        sizes: what to grow, and how far.
        turns: times that every pass is timed.
        announce: is called with one line for the user at a time.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware``, ``git``, ``target``, ``sizes``,
        ``turns``, and ``curves``: each with ``what`` (the pass), ``along`` (what grows), its
        ``points`` (``size``, median ``seconds``, quartiles ``low`` and ``high``) and ``line``.
    """
    header = provenance.header(target)
    announce("making models and reading contexts")
    with torch.no_grad():
        passes = timed_passes(target, components, drafter, sizes)
    announce(f"timing {len(passes)} passes, {turns} turns each")
    with torch.inference_mode():
        seconds = alternate(passes, turns, target.device)
    return {
        **header,
        "target": provenance.target_of(target) | {"lean": target.backbone.lean is not None},
        "drafter": dict(drafter),
        "sizes": asdict(sizes),
        "turns": turns,
        "curves": curves(passes, seconds),
    }


def alternate(passes: Sequence[TimedPass], turns: int, device: torch.device) -> list[list[float]]:
    """Return the seconds of every pass in every turn. Each turn begins with another pass.

    A pass is run once just before it is timed, so that its weights lie where they do when passes
    of one kind follow each other.
    """
    taken: list[list[float]] = [[] for _ in passes]
    for _, number in in_turns(range(len(passes)), turns):
        once(passes[number], device)
        taken[number].append(once(passes[number], device))
    return taken


def curves(passes: Sequence[TimedPass], seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The measured points of every kind of pass along every axis, with their lines."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for timed, taken in zip(passes, seconds, strict=True):
        low, middle, high = (float(q) for q in np.quantile(taken, (0.25, 0.5, 0.75)))
        point = {"size": timed.size, "seconds": middle, "low": low, "high": high}
        found.setdefault((timed.along, timed.what), []).append(point)
    return [
        {
            "what": what,
            "along": along,
            "points": points,
            "line": asdict(
                Line.through([p["size"] for p in points], [p["seconds"] for p in points])
            ),
        }
        for (along, what), points in found.items()
    ]


def _end(place: int) -> Callable[[Mapping[str, Any]], str]:
    def cell(curve: Mapping[str, Any]) -> str:
        point = curve["points"][place]
        return f"{point['size']}: {1000 * point['seconds']:.3g} ms"

    return cell


CURVES = (
    Column("along", "along"),
    Column("pass", "what"),
    Column("from", _end(0)),
    Column("to", _end(-1)),
    Column("fixed", lambda curve: f"{1000 * curve['line']['intercept']:.3g} ms"),
    Column("each", lambda curve: f"{1e6 * curve['line']['slope']:.4g} µs"),
    Column("off the line", lambda curve: curve["line"]["deviation"], percent(unit=" %")),
)


def format_scaling(results: Mapping[str, Any]) -> str:
    """Write one row for every curve: its ends, and its line."""
    return Table(CURVES, results["curves"]).text()


AXES = {
    "nodes": "nodes of a tree, tokens of new blocks",
    "context": "positions before",
    "batch": "sequences",
    "vocabulary": "entries of the vocabulary",
    "draft vocabulary": "tokens of the draft vocabulary",
}
SPREAD = 64
"""Largest over smallest size from which both scales are logarithmic: else most points are one."""


def write_plot(path: Path, results: Mapping[str, Any]) -> Path:
    """Write an SVG with one panel for everything that grows: the points and the lines beside."""
    colours = colours_of(list(dict.fromkeys(curve["what"] for curve in results["curves"])))
    along: dict[str, list[Mapping[str, Any]]] = {}
    for curve in results["curves"]:
        along.setdefault(curve["along"], []).append(curve)
    panels = [_panel(name, curves, colours) for name, curves in along.items()]
    return write_atomically(path, line_plot(panels, "scaling", width=10, height=3.6))


def _panel(name: str, found: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> Panel:
    ticks = sorted({point["size"] for curve in found for point in curve["points"]})
    wide = ticks[-1] >= SPREAD * ticks[0]
    return Panel(
        [line for curve in found for line in _curves(curve, colours[curve["what"]])],
        f"Along the {name}",
        AXES.get(name, name),
        "ms a pass",
        ticks=ticks if wide else (),
        log="xy" if wide else "",
        bottom=None if wide else 0,
        headroom=2.5 if wide else 1.35,
    )


def _curves(curve: Mapping[str, Any], colour: str) -> tuple[Curve, Curve]:
    """Return what was measured, and the straight line beside it."""
    line = curve["line"]
    sizes, middle, low, high = (
        [factor * point[key] for point in curve["points"]]
        for key, factor in (("size", 1), ("seconds", 1000), ("low", 1000), ("high", 1000))
    )
    label = (
        f"{curve['what']}: {1000 * line['intercept']:.3g} ms + {_micro(line['slope'])} µs each"
        f" (± {100 * line['deviation']:.0f} %)"
    )
    smooth = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
    fitted = [1000 * (line["intercept"] + line["slope"] * size) for size in smooth]
    return (
        Curve(sizes, middle, colour, label, low, high, interval="whiskers", style=""),
        Curve(smooth, fitted, colour, style="--", marker=""),
    )


def _micro(seconds: float) -> str:
    """Write microseconds with two figures, never as a power of ten."""
    return f"{1e6 * seconds:.0f}" if seconds >= 1e-5 else f"{1e6 * seconds:.2g}"
