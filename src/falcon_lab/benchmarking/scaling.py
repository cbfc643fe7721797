"""How the cost of a pass grows with nodes, context, batch and vocabulary, and whether in a line.

All passes of all sizes take turns in one process, so that a slow moment of the machine falls on
every size alike; a figure is the median of its turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from falcon_lab.benchmarking.scaling_probes import Probe, Sizes, probes_of
from falcon_lab.evaluation.table import align
from falcon_lab.reporting import provenance

if TYPE_CHECKING:
    from falcon_lab.components import Components
    from falcon_lab.schema import Node
    from falcon_lab.targets.target import Target


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
    hardware = provenance.hardware(device=str(target.device), dtype=str(target.dtype))
    announce("making models and reading contexts")
    with torch.no_grad():
        probes = probes_of(target, components, drafter, sizes)
    announce(f"timing {len(probes)} passes, {turns} turns each")
    with torch.inference_mode():
        seconds = alternate(probes, turns, target.device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": provenance.command_line(),
        "versions": provenance.versions(),
        "hardware": hardware,
        "git": provenance.git_state(),
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
    for turn in range(turns):
        for place in range(len(probes)):
            number = (turn + place) % len(probes)
            once(probes[number], device)
            taken[number].append(once(probes[number], device))
    return taken


def once(probe: Probe, device: torch.device) -> float:
    """Seconds of one pass; what prepares it and cleans up after it is not timed."""
    probe.before()
    _wait(device)
    started = perf_counter()
    probe.run()
    _wait(device)
    seconds = perf_counter() - started
    probe.after()
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
