"""How the cost of a pass grows with nodes, context, batch and vocabulary, and whether in a line.

All passes of all sizes take turns in one process, so that a slow moment of the machine falls on
every size alike; a figure is the median of its turns.

The curves of ``scaling.py`` as a picture: what was measured, and the straight line beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from falcon_lab.files import replacing
from falcon_lab.measure import provenance
from falcon_lab.measure.pass_costs import Probe, Sizes, once, probes_of
from falcon_lab.report.plots import COLOURS, STYLE
from falcon_lab.studies.evaluate import align
from falcon_lab.timing import in_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        """The line with the least squares of relative distances: a microsecond matters less where
        a pass takes a hundred times as long. One size gives a flat line."""
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
        announce: takes one line for the user at a time.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware``, ``git``, ``target``, ``sizes``,
        ``turns``, and ``curves``: each with ``what`` (the pass), ``along`` (what grows), its
        ``points`` (``size``, median ``seconds``, quartiles ``low`` and ``high``) and ``line``.
    """
    header = provenance.header(target)
    announce("making models and reading contexts")
    with torch.no_grad():
        probes = probes_of(target, components, drafter, sizes)
    announce(f"timing {len(probes)} passes, {turns} turns each")
    with torch.inference_mode():
        seconds = alternate(probes, turns, target.device)
    return {
        **header,
        "target": provenance.target_of(target) | {"lean": target.backbone.lean is not None},
        "drafter": dict(drafter),
        "sizes": asdict(sizes),
        "turns": turns,
        "curves": curves(probes, seconds),
    }


def alternate(probes: Sequence[Probe], turns: int, device: torch.device) -> list[list[float]]:
    """Seconds of every probe in every turn. Each turn begins with another one.

    A pass is run once just before it is timed, so that its weights lie where they do when passes
    of one kind follow each other.
    """
    taken: list[list[float]] = [[] for _ in probes]
    for _, number in in_turns(range(len(probes)), turns):
        once(probes[number], device)
        taken[number].append(once(probes[number], device))
    return taken


def curves(probes: Sequence[Probe], seconds: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """The measured points of every kind of pass along every axis, with their lines."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for probe, taken in zip(probes, seconds, strict=True):
        low, middle, high = (float(q) for q in np.quantile(taken, (0.25, 0.5, 0.75)))
        point = {"size": probe.size, "seconds": middle, "low": low, "high": high}
        found.setdefault((probe.along, probe.what), []).append(point)
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


def format_scaling(results: Mapping[str, Any]) -> str:
    """One row for every curve: its ends, and its line."""
    table = [["along", "pass", "from", "to", "fixed", "each", "off the line"]]
    for curve in results["curves"]:
        first, last, line = curve["points"][0], curve["points"][-1], curve["line"]
        table.append(
            [
                curve["along"],
                curve["what"],
                *(f"{p['size']}: {1000 * p['seconds']:.3g} ms" for p in (first, last)),
                f"{1000 * line['intercept']:.3g} ms",
                f"{1e6 * line['slope']:.4g} µs",
                f"{100 * line['deviation']:.0f} %",
            ]
        )
    return align(table)


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
