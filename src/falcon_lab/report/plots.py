"""The plots of the report, as inline SVG: no file, no network, no global matplotlib state.

Every function takes parts of ``results.json`` or the training history and gives SVG text, or
``""`` where there is nothing to draw.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from falcon_lab.report.history import series
from falcon_lab.studies.evaluate import name_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e6eb"
BASELINE = "#9aa3af"
COLOURS = ("#2f6fbb", "#1f7a4d", "#d98324", "#8a5cb8", "#c2465a", "#3a9ca3", "#7a6a53")
PARTS = {  # part of the time -> (label, colour)
    "prefill": ("prefill", "#d5c7a8"),
    "draft": ("draft", "#d98324"),
    "verify": ("verify", "#2f6fbb"),
    "accept_commit": ("accept + commit", "#1f7a4d"),
    "overhead": ("overhead", "#9aa3af"),
    "other": ("not split", "#d3d7dd"),
}
STYLE = {
    "svg.fonttype": "none",  # the reader's own fonts: small files, text that can be searched
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 9,
}

Methods = Mapping[str, Mapping[str, Any]]


def draw(width: float, height: float, paint: Callable[[Figure], None], salt: str) -> str:
    """A figure as SVG text. ``salt`` keeps the ids of several figures on one page apart."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Readers on a narrow screen get a narrower plot.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 class="plot"', svg, count=1)


def colours(methods: Methods) -> dict[str, str]:
    """A colour for every method; the two that do not draft are grey."""
    drafting = [name for name, s in methods.items() if s["tau"] is not None]
    return {
        name: COLOURS[drafting.index(name) % len(COLOURS)] if name in drafting else BASELINE
        for name in methods
    }


def training_curves(history: list[dict[str, Any]]) -> str:
    """Loss, accuracy by place in the block, expected acceptance and τ, and the glance ratio."""
    panels = [
        (title, found)
        for title, pattern in (
            ("Loss", r"(train|val)/loss"),
            ("Accuracy by place in the block", r"(train|val)/position_\d+/accuracy"),
            ("Expected acceptance, 1 − TV", r"val/(position_\d+/)?accept_rate"),
            ("Expected τ, bonus token counted", r"val/expected_accept_length\w*"),
            ("Glance ratio λ", r"train/glance_ratio"),
            ("Share of rows that the loss kept", r"train/kept"),
        )
        if (found := _matching(history, pattern))
    ]
    if not panels:
        return ""

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (title, names) in zip(axes, panels, strict=False):
            for colour, name in zip(COLOURS * 3, names, strict=False):
                steps, values = series(history, name)
                style = {"marker": "o", "markersize": 3} if name.startswith("val/") else {}
                axis.plot(steps, values, label=_short(name), color=colour, linewidth=1.5, **style)
            axis.set_title(title)
            axis.set_xlabel("step")
            axis.legend()
        for axis in axes[len(panels) :]:
            axis.set_visible(False)

    return draw(9, 2.7 * rows, paint, "curves")


def _matching(history: list[dict[str, Any]], pattern: str) -> list[str]:
    names = {name for record in history for name in record if re.fullmatch(pattern, name)}
    return sorted(names)[:8]


def _short(metric: str) -> str:
    metric = re.sub(r"(position_\d+)/\w+", r"\1", metric)
    return metric.replace("_", " ")


def acceptance(methods: Methods) -> str:
    """Accepted share by position: of all rounds, and of those that came so far."""
    from matplotlib.ticker import MaxNLocator

    drafting = {name: s for name, s in methods.items() if s["acceptance"]}
    if not drafting:
        return ""
    colour = colours(methods)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axis, key, title in (
            (left, "acceptance", "of all rounds"),
            (right, "acceptance_conditional", "given that the one before was accepted"),
        ):
            for name, s in drafting.items():
                points = [(i, 100 * v) for i, v in enumerate(s[key], 1) if v is not None]
                axis.plot(
                    [i for i, _ in points],
                    [v for _, v in points],
                    color=colour[name],
                    label=name_of(name, s),
                    marker="o",
                    markersize=4,
                )
            axis.set_title(title)
            axis.set_xlabel("draft position")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_ylim(0, 103)
        left.set_ylabel("accepted, %")
        left.legend()

    return draw(9, 3.1, paint, "acceptance")


def time_split(methods: Methods) -> str:
    """Where the milliseconds of a new token go, method by method."""
    timed = {name: s for name, s in methods.items() if s["milliseconds_per_token"]}
    if not timed:
        return ""

    longest = max(sum(s["milliseconds_per_token"].values()) for s in timed.values())

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        for row, summary in enumerate(timed.values()):
            _stack(axis, row, summary["milliseconds_per_token"], room=0.05 * longest)
        _method_axis(axis, timed)
        axis.set_xlabel("milliseconds per new token, prefill included")
        shown = {part for s in timed.values() for part in s["milliseconds_per_token"]}
        handles = [
            axis.barh([0], [0], color=colour, label=label)
            for part, (label, colour) in PARTS.items()
            if part in shown
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))

    return draw(9, 1.3 + 0.42 * len(timed), paint, "time")


def _stack(axis: Axes, row: int, parts: Mapping[str, float], *, room: float) -> None:
    """One bar; a part is labelled when it is at least ``room`` wide."""
    left, whole = 0.0, sum(parts.values())
    for part, (_, colour) in PARTS.items():
        width = parts.get(part, 0.0)
        axis.barh(row, width, left=left, color=colour, height=0.66)
        if part != "other" and width >= room:
            middle = left + width / 2
            axis.text(
                middle, row, f"{width:.2g}", ha="center", va="center", color="white", fontsize=9
            )
        left += width
    _beside(axis, left, row, f"{whole:.3g}")


def _beside(axis: Axes, x: float, row: int, text: str) -> None:
    """Text just right of a bar's end."""
    axis.annotate(
        text, (x, row), (5, 0), textcoords="offset points", va="center", color=INK, fontsize=10
    )


def _method_axis(axis: Axes, methods: Methods) -> None:
    axis.set_yticks(range(len(methods)), [name_of(name, s) for name, s in methods.items()])
    axis.tick_params(axis="y", length=0, labelcolor=INK)
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.1)
    axis.invert_yaxis()


def speedups(methods: Methods) -> str:
    """Speed-up over plain decoding with its 95 % interval."""
    rated = {name: s for name, s in methods.items() if s["speedup"]}
    if not rated:
        return ""
    colour = colours(methods)

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        for row, (name, s) in enumerate(rated.items()):
            _interval(axis, row, s["speedup"], colour[name])
        axis.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        _method_axis(axis, rated)
        axis.set_xlim(left=0)
        axis.set_xlabel("speed-up over plain decoding (dashed), 95 % interval")

    return draw(9, 0.9 + 0.42 * len(rated), paint, "speed")


def _interval(axis: Axes, row: int, speedup: Mapping[str, Any], colour: str) -> None:
    ratio, low, high = (speedup[key] for key in ("ratio", "low", "high"))
    axis.barh(row, ratio, color=colour, height=0.62, alpha=0.9)
    edge = ratio
    if low is not None:
        axis.plot([low, high], [row, row], color=INK, linewidth=1.6, marker="|", markersize=9)
        edge = max(edge, high)
    _beside(axis, edge, row, f"{ratio:.2f}×")


def accepted_histograms(methods: Methods) -> str:
    """How many draft tokens a round accepts, as shares of all rounds."""
    from matplotlib.ticker import MaxNLocator

    drafting = {name: s for name, s in methods.items() if s["accepted_histogram"]}
    if not drafting:
        return ""
    colour = colours(methods)

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        width = 0.8 / len(drafting)
        for place, (name, s) in enumerate(drafting.items()):
            counts: Sequence[int] = s["accepted_histogram"]
            at = [i - 0.4 + width * (place + 0.5) for i in range(len(counts))]
            shares = [100 * count / sum(counts) for count in counts]
            axis.bar(at, shares, width=width * 0.92, color=colour[name], label=name_of(name, s))
        axis.grid(visible=False, axis="x")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("draft tokens accepted in a round")
        axis.set_ylabel("rounds, %")
        axis.legend()

    return draw(9, 2.7, paint, "histogram")
