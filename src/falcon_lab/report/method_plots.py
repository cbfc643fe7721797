"""The plots of a run: training curves, and the ``methods`` of ``results.json``.

Each draws its part of the results and returns SVG text, or ``""`` where there is nothing to draw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import cycle
from typing import Any

from falcon_lab.history import series
from falcon_lab.report.methods import name_of
from falcon_lab.report.plots import (
    BASELINE,
    COLOURS,
    Bar,
    Curve,
    Panel,
    bar_plot,
    colours_of,
    line_plot,
)

PARTS = {  # part of the time -> (label, colour)
    "prefill": ("prefill", "#d5c7a8"),
    "draft": ("draft", "#d98324"),
    "verify": ("verify", "#2f6fbb"),
    "accept_commit": ("accept + commit", "#1f7a4d"),
    "overhead": ("overhead", "#9aa3af"),
    "other": ("not split", "#d3d7dd"),
}
CURVES = {  # title -> names of the metrics
    "Loss": r"(train|val)/loss",
    "Accuracy by place in the block": r"(train|val)/position_\d+/accuracy",
    "Expected acceptance, 1 − TV": r"val/(position_\d+/)?accept_rate",
    "Expected τ, bonus token counted": r"val/expected_accept_length\w*",
    "Glance ratio λ": r"train/glance_ratio",
    "Share of rows in the loss": r"train/kept",
}
MOST = 8
"""Curves in a panel at the most."""

Methods = Mapping[str, Mapping[str, Any]]


def training_curves(history: list[dict[str, Any]]) -> str:
    """Draw loss, accuracy by place in the block, expected acceptance and τ, and the glances."""
    panels = [
        Panel(
            [_curve(history, name, c) for name, c in zip(names, cycle(COLOURS), strict=False)],
            title,
            "step",
            whole=True,
        )
        for title, names in ((title, _matching(history, p)) for title, p in CURVES.items())
    ]
    return line_plot(panels, "curves", height=2.7)


def _curve(history: list[dict[str, Any]], name: str, colour: str) -> Curve:
    steps, values = series(history, name)
    label = re.sub(r"(position_\d+)/\w+", r"\1", name).replace("_", " ")
    return Curve(
        steps, values, colour, label, marker="o" if name.startswith("val/") else "", size=3
    )


def _matching(history: list[dict[str, Any]], pattern: str) -> list[str]:
    names = {name for record in history for name in record if re.fullmatch(pattern, name)}
    return sorted(names)[:MOST]


def colours(methods: Methods) -> dict[str, str]:
    """Return a colour for every method; those that do not draft are grey."""
    drafting = colours_of([name for name, s in methods.items() if s["tau"] is not None])
    return {name: drafting.get(name, BASELINE) for name in methods}


def speedups(methods: Methods, predicted: Mapping[str, float] | None = None) -> str:
    """Draw the speed-up over plain decoding with its 95 % interval.

    Args:
        methods: those without a speed-up are left out.
        predicted: speed-ups to mark beside the measured ones, by method.
    """
    colour, marks = colours(methods), predicted or {}
    bars = [
        Bar(
            name_of(name, s),
            [(found["ratio"], colour[name], "")],
            f"{found['ratio']:.2f}×",
            found["low"],
            found["high"],
            marks.get(name),
        )
        for name, s in methods.items()
        if (found := s["speedup"])
    ]
    label = "speed-up over plain decoding (dashed), 95 % interval"
    return bar_plot(bars, "speed", x=label, level=1, mark="predicted" if marks else "")


def time_split(methods: Methods) -> str:
    """Draw where the milliseconds of a new token go, method by method."""
    timed = {
        name_of(name, s): s["milliseconds_per_token"]
        for name, s in methods.items()
        if s["milliseconds_per_token"]
    }
    longest = max((sum(split.values()) for split in timed.values()), default=0)
    bars = [
        Bar(
            name,
            [
                (split[part], colour, _inscription(part, split[part], longest))
                for part, (_, colour) in PARTS.items()
                if part in split
            ],
            f"{sum(split.values()):.3g}",
        )
        for name, split in timed.items()
    ]
    seen = {part for split in timed.values() for part in split}
    legend = {label: colour for part, (label, colour) in PARTS.items() if part in seen}
    return bar_plot(bars, "time", x="milliseconds per new token, prefill included", legend=legend)


def _inscription(part: str, milliseconds: float, longest: float) -> str:
    """Write a part's milliseconds, where they fit and mean something."""
    return f"{milliseconds:.2g}" if part != "other" and milliseconds >= 0.05 * longest else ""


def acceptance(methods: Methods) -> str:
    """Draw the accepted share by position: of all rounds, and of those that came so far."""
    titles = {
        "acceptance": "of all rounds",
        "acceptance_conditional": "given that the one before was accepted",
    }
    panels = [
        Panel(
            _by_place(methods, "acceptance", lambda s, key=key: s[key], start=1),
            title,
            "draft position",
            "accepted, %" if key == "acceptance" else "",
            whole=True,
            bottom=0,
            legend=key == "acceptance",
        )
        for key, title in titles.items()
    ]
    return line_plot(panels, "acceptance", height=3.1, share_y=True)


def accepted_histograms(methods: Methods) -> str:
    """Draw how many draft tokens a round accepts, as shares of all rounds."""
    lines = _by_place(
        methods,
        "accepted_histogram",
        lambda s: [count / sum(s["accepted_histogram"]) for count in s["accepted_histogram"]],
        start=0,
    )
    panel = Panel(
        lines, "", "draft tokens accepted in a round", "rounds, %", whole=True, bars=True, bottom=0
    )
    return line_plot([panel], "histogram", height=2.7)


def _by_place(methods: Methods, key: str, shares: Any, *, start: int) -> list[Curve]:
    """Return a line of shares, in percent, for every method that has ``key``."""
    colour = colours(methods)
    return [
        Curve(
            range(start, start + len(found)),
            [None if share is None else 100 * share for share in found],
            colour[name],
            name_of(name, s),
        )
        for name, s in methods.items()
        if s[key] and (found := shares(s))
    ]
