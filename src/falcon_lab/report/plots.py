"""One way to draw: panels of lines and bars with intervals, as SVG text.

No file, no network, and matplotlib's global settings are left as they were. A plot of nothing is
``""``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e3e6eb"
BASELINE = "#9aa3af"
COLOURS = ("#2f6fbb", "#1f7a4d", "#d98324", "#8a5cb8", "#c2465a", "#3a9ca3", "#7a6a53")
STYLES = ("-", "--", ":", "-.")
"""Lines beyond the last colour take the next style."""
MARKERS = ("o", "s", "^", "D")
"""Of the points of each style."""

DASHED = (0, (4, 3))
WIDTH = 9.0
"""Inches of a plot that fills a page."""

STYLE = {
    "svg.fonttype": "none",  # the reader's own fonts: small files, text that can be searched
    "text.parse_math": False,  # names of methods and heads are no formulas
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

Value = float | None


@dataclass(frozen=True)
class Curve:
    """A curve, or points alone.

    Attributes:
        x: places; any length, as of all that follow.
        y: values; a point without one is left out.
        colour: of the line, its points and its interval.
        label: in the legend; without one it has no entry.
        low: lower ends of the intervals; a point without one has no interval.
        high: upper ends.
        interval: how intervals are drawn.
        style: matplotlib's name of a line style; ``""`` draws points alone.
        marker: matplotlib's name of a marker; ``""`` draws none.
        size: of a marker.
    """

    x: Sequence[float]
    y: Sequence[Value]
    colour: str
    label: str = ""
    low: Sequence[Value] = ()
    high: Sequence[Value] = ()
    interval: Literal["band", "whiskers"] = "band"
    style: str = "-"
    marker: str = "o"
    size: float = 4


@dataclass(frozen=True)
class Panel:
    """A pair of axes.

    Attributes:
        curves: what it shows; a panel without curves is not drawn.
        title: above it.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        level: height of a dashed line that the others are compared with.
        ticks: the places that are named on the horizontal axis; none leaves that to matplotlib.
        log: which axes are logarithmic: ``x``, ``xy`` or neither.
        whole: only whole numbers are named on the horizontal axis.
        bars: curves are groups of vertical bars, one a whole number.
        bottom: where the vertical axis begins; None leaves that to matplotlib.
        headroom: factor of the vertical axis' upper end, for a long legend.
        legend: whether the panel has one.
    """

    curves: Sequence[Curve]
    title: str = ""
    x: str = ""
    y: str = ""
    level: float | None = None
    ticks: Sequence[float] = ()
    log: Literal["", "x", "xy"] = ""
    whole: bool = False
    bars: bool = False
    bottom: float | None = None
    headroom: float = 1
    legend: bool = True


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of one or more parts.

    Attributes:
        label: left of it.
        parts: width, colour and inscription of every part, from left to right.
        text: right of it.
        low: lower end of the interval of its whole width, if there is one.
        high: upper end.
        mark: a width that is marked by a point, if any.
    """

    label: str
    parts: Sequence[tuple[float, str, str]]
    text: str = ""
    low: Value = None
    high: Value = None
    mark: Value = None


def draw(width: float, height: float, paint: Callable[[Figure], None], salt: str) -> str:
    """Draw a figure as SVG text.

    Args:
        width: inches; a page scales it.
        height: inches.
        paint: fills the figure.
        salt: keeps the ids of several figures on one page apart, and the same from run to run.
    """
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
    # Without a size of its own a plot is as wide as the screen of its reader allows.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 class="plot"', svg, count=1)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for every name, the same for the same names."""
    return dict(zip(names, cycle(COLOURS), strict=False))


def line_plot(
    panels: Sequence[Panel],
    salt: str,
    *,
    width: float = WIDTH,
    height: float = 3.0,
    columns: int = 2,
    share_y: bool = False,
    legend_beside: bool = False,
) -> str:
    """Draw panels side by side.

    Args:
        panels: in order, ``columns`` in a row; those without curves are left out.
        salt: as of ``draw``.
        width: inches in all.
        height: inches of a row.
        columns: panels in a row at the most.
        share_y: whether all have one vertical axis, which the first names.
        legend_beside: one legend for all, right of them, in place of one in each.
    """
    shown = [panel for panel in panels if panel.curves]
    if not shown:
        return ""
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)

    def paint(figure: Figure) -> None:
        axes = list(figure.subplots(rows, columns, squeeze=False, sharey=share_y).flat)
        for axis, panel in zip(axes, shown, strict=False):
            _paint_panel(axis, panel, legend=panel.legend and not legend_beside)
        for axis, panel in zip(axes, shown, strict=False):  # now that all curves are known
            if panel.bottom is not None:
                axis.set_ylim(bottom=panel.bottom)
            if panel.headroom != 1:
                axis.set_ylim(top=axis.get_ylim()[1] * panel.headroom)
        for axis in axes[len(shown) :]:
            axis.remove()
        if legend_beside:
            entries = dict(
                (label, handle)
                for axis in axes[: len(shown)]
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
            )
            figure.legend(entries.values(), entries, loc="outside right upper")

    return draw(width, height * rows, paint, salt)


def bar_plot(
    bars: Sequence[Bar],
    salt: str,
    *,
    x: str,
    level: float | None = None,
    legend: Mapping[str, str] | None = None,
    mark: str = "",
) -> str:
    """Draw horizontal bars, the first on top.

    Args:
        bars: none give ``""``.
        salt: as of ``draw``.
        x: label of the axis.
        level: place of a dashed line that bars are compared with.
        legend: what a part is, and its colour.
        mark: what the marked points are.
    """
    if not bars:
        return ""

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        for row, bar in enumerate(bars):
            _paint_bar(axis, row, bar)
        if level is not None:
            axis.axvline(level, color=INK, linewidth=1, linestyle=DASHED)
        axis.set_yticks(range(len(bars)), [bar.label for bar in bars])
        axis.tick_params(axis="y", length=0, labelcolor=INK)
        axis.grid(visible=False, axis="y")
        axis.margins(x=0.1)
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_xlabel(x)
        handles: list[Any] = [
            axis.barh([0], [0], color=colour, label=label)
            for label, colour in (legend or {}).items()
        ]
        if mark:
            handles += axis.plot([], [], "D", color=INK, markersize=5, label=mark)
        if handles:
            figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))

    return draw(WIDTH, (1.3 if legend or mark else 0.9) + 0.42 * len(bars), paint, salt)


def _paint_panel(axis: Axes, panel: Panel, *, legend: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, curve in enumerate(panel.curves):
        if panel.bars:
            _paint_columns(axis, curve, place, len(panel.curves))
        else:
            _paint_curve(axis, curve)
    if panel.level is not None:
        axis.axhline(panel.level, color=INK, linewidth=1, linestyle=DASHED)
    axis.ticklabel_format(useOffset=False)
    if "x" in panel.log:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
    if "y" in panel.log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    if panel.ticks:
        axis.set_xticks(panel.ticks, [_tick(place) for place in panel.ticks])
        axis.minorticks_off()
    if panel.whole:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x)
    axis.set_ylabel(panel.y)
    if legend and any(curve.label for curve in panel.curves):
        axis.legend(loc="upper left" if panel.headroom > 1 else "best")


def _paint_columns(axis: Axes, curve: Curve, place: int, groups: int) -> None:
    """Paint a curve as vertical bars; those of several curves stand beside each other."""
    width = 0.8 / groups
    middle = [x - 0.4 + width * (place + 0.5) for x in curve.x]
    axis.bar(middle, [y or 0 for y in curve.y], 0.92 * width, color=curve.colour, label=curve.label)


def _paint_curve(axis: Axes, curve: Curve) -> None:
    style: dict[str, Any] = {"color": curve.colour, "linestyle": curve.style, "linewidth": 1.5}
    style |= {"marker": curve.marker, "markersize": curve.size, "label": curve.label or None}
    points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
    axis.plot([x for x, _ in points], [y for _, y in points], **style)
    known = [
        (x, low, high)
        for x, low, high in zip(curve.x, curve.low, curve.high, strict=False)
        if low is not None and high is not None
    ]
    if not known:
        return
    x, low, high = zip(*known, strict=True)
    if curve.interval == "band":
        axis.fill_between(x, low, high, color=curve.colour, alpha=0.12, linewidth=0)
    else:
        axis.vlines(x, low, high, color=curve.colour, linewidth=1)


def _paint_bar(axis: Axes, row: int, bar: Bar) -> None:
    left = 0.0
    inside: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "fontsize": 9}
    for width, colour, text in bar.parts:
        axis.barh(row, width, left=left, color=colour, height=0.64, alpha=0.95)
        axis.text(left + width / 2, row, text, **inside)
        left += width
    edge = left
    if bar.low is not None and bar.high is not None:
        axis.plot([bar.low, bar.high], [row, row], color=INK, marker="|", markersize=9)
        edge = max(edge, bar.high)
    if bar.mark is not None:
        axis.plot(bar.mark, row, "D", color=INK, markersize=5)
        edge = max(edge, bar.mark)
    beside: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center",
        "color": INK,
        "fontsize": 10,
    }
    axis.annotate(bar.text, (edge, row), (7, 0), **beside)


def _tick(place: float) -> str:
    """Write 4096 as ``4k``."""
    return f"{place / 1024:g}k" if place >= 1024 else f"{place:g}"
