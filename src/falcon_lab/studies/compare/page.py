"""Speed-up against what a round verifies, or what it costs, for every head.

The report of a comparison: one HTML file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.files import write_atomically
from falcon_lab.measure.metrics import DEFINITIONS
from falcon_lab.report.comparison import figure, table
from falcon_lab.report.page import banner, folded, header, listing, origin_of, page
from falcon_lab.report.plots import COLOURS, INK, draw
from falcon_lab.studies.compare import table as text
from falcon_lab.studies.compare.budgets import BEST
from falcon_lab.studies.compare.paper import LABELS
from falcon_lab.studies.compare.table import named
from falcon_lab.studies.evaluate import NOTHING, speedup_text

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


DEFINED = (
    "speedup",
    "tau",
    "tau_draft",
    "alpha",
    "acceptance",
    "nodes_per_round",
    "passes_per_round",
    "time_split",
    "identical_share",
)
"""Figures of the tables whose definition is printed."""


def write_page(path: Path, results: Mapping[str, Any]) -> Path:
    """Write the file whole or not at all.

    Args:
        path: the file.
        results: of ``compare``.

    Raises:
        FalconLabError: it cannot be written.
    """
    return write_atomically(path, render(results))


def render(results: Mapping[str, Any]) -> str:
    """The whole page."""
    title = (results["experiment"].get("report") or {}).get("title") or results["name"]
    warnings = text.warnings(results)
    parts = (
        header(f"{title} · {results['date'][:10]}", headline(results), lead(results)),
        banner(warnings) if warnings else "",
        _pictures(results),
        _rows(results),
        _ahead(results),
        _paper(results),
        _heads(results),
        _details(results),
        _protocol(results),
        "<h2>What the figures mean</h2>\n" + listing({key: DEFINITIONS[key] for key in DEFINED}),
        _provenance(results),
    )
    return page(str(title), "\n".join(filter(None, parts)))


def headline(results: Mapping[str, Any]) -> str:
    """What the figures support, in a sentence: greedy, and at the best budgets if there are any."""
    rows = text.ordered(results["rows"])
    rows = [row for row in rows if row["temperature"] == rows[0]["temperature"]]
    rows = [row for row in rows if row["budget"] == BEST] or rows
    top = max(rows, key=lambda row: row["speedup"]["ratio"])
    said = (
        f"{text.named(top['head'], top['lossless'])} is the fastest of {len(results['heads'])} "
        f"heads at {speedup_text(top['speedup'])} ({top['budget']})"
    )
    at = (top["temperature"], top["budget"], top["head"])
    over = [p for p in results["pairs"] if (p["temperature"], p["budget"], p["head"]) == at]
    if not over:
        return f"{said}."
    nearest = min(over, key=lambda pair: pair["speedup"]["ratio"])
    clearly = "clearly ahead of" if nearest["faster"] else "not clearly ahead of"
    return f"{said}, {clearly} {nearest['than']}: {speedup_text(nearest['speedup'])}."


def lead(results: Mapping[str, Any]) -> str:
    """Where the figures come from, in a line."""
    h, target = results["hardware"], results["target"] or {}
    machine = h.get("gpu") or f"{h['cpu']}, {h['threads']} of {h['cores']} cores"
    seeds = max(len(row["seeds"]) for row in results["rows"])
    trainings = "one training of each head" if seeds == 1 else f"{seeds} training seeds"
    return (
        f"{target.get('name')} on {machine}, {str(h.get('dtype') or '').removeprefix('torch.')}, "
        f"one sequence at a time, {results['protocol']['prompts']} prompts, {trainings}."
    )


def _pictures(results: Mapping[str, Any]) -> str:
    return "\n".join(
        (
            "<h2>Speed-up against nodes</h2>",
            figure(
                speed_against(NODES, results["rows"]),
                "Bands: 95 % interval over training seeds and prompts. Stars: each head's own best "
                "tree.",
            ),
            "<h2>Speed-up against the time of a round</h2>",
            figure(
                speed_against(ROUND, results["rows"]),
                "The same measurements: speed-up is tokens a round over the time of a round, so of "
                "two heads at one height the left one writes fewer tokens in cheaper rounds.",
            ),
        )
    )


def _rows(results: Mapping[str, Any]) -> str:
    rows = text.ordered(results["rows"])
    fastest = {(row["temperature"], row["budget"]): row for row in reversed(rows)}.values()
    shown = [
        (any(row is top for top in fastest), [escape(cell) for cell in text.cells(row)])
        for row in rows
    ]
    return "<h2>Comparison</h2>\n" + table([escape(name) for name in text.ROWS], shown)


def _details(results: Mapping[str, Any]) -> str:
    shown = [
        (False, [escape(cell) for cell in text.detail_cells(row)])
        for row in text.ordered(results["rows"])
    ]
    return "<h2>Acceptance and memory</h2>\n" + table(text.DETAILS, shown)


def _ahead(results: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in text.ahead(results))
    return f"<h2>Who is ahead</h2>\n<ul>{items}</ul>" if items else ""


def _heads(results: Mapping[str, Any]) -> str:
    rows = [
        (False, [escape(cell) for cell in text.head_cells(name, head)])
        for name, head in results["heads"].items()
    ]
    return "<h2>The heads</h2>\n" + table(text.HEADS, rows)


def _paper(results: Mapping[str, Any]) -> str:
    paper = results["paper"]
    if not paper:
        return ""
    parts = [f"<h2>Beside the paper</h2>\n<p>{escape(paper['source'])}</p>"]
    for found in paper["metrics"]:
        columns = list(found["rows"][0]["published"]) if found["rows"] else []
        rows = [
            (
                False,
                [
                    escape(row["row"]),
                    *(_figure(row["published"][column]) for column in columns),
                    escape(text.interval(row["ours"])),
                ],
            )
            for row in found["rows"]
        ]
        label = LABELS[found["metric"]]
        head = [label, *columns, "ours [95 %]"]
        parts.append(table([escape(cell) for cell in head], rows))
        parts.append(f"<p>Order of {label}: <strong>{found['verdict']}</strong></p>")
        parts.append(_orders(found["pairs"]))
    notes = "".join(f"<li>{escape(note)}</li>" for note in paper["notes"])
    return "\n".join([*parts, f'<ul class="note">{notes}</ul>' if notes else ""])


def _figure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:g}"


def _orders(pairs: list[dict[str, Any]]) -> str:
    rows = [(False, [escape(cell) for cell in text.order_cells(pair)]) for pair in pairs]
    return table(text.ORDER, rows) if rows else ""


def _protocol(results: Mapping[str, Any]) -> str:
    protocol = results["protocol"]
    return (
        "<h2>How it was measured</h2>\n<p>"
        "Every head was trained on the same target, data and steps, once for each seed. All "
        "drafters were then loaded into one process and answered the same "
        f"{protocol['prompts']} prompts in turns, {protocol['repeats']} time(s), after a warm-up "
        f"on {protocol['warmup']}; who went first moved on by one each time. Plain decoding took "
        f"{protocol['yardsticks']} turn(s) on every prompt, spread among the heads, and its median "
        "there is the yardstick. chain-D drafts D tokens in a row; tree-N verifies up to N nodes, "
        "grown where the head itself is surest, by the same rule for every head; best is the "
        "budget that was fastest on other prompts. Intervals resample training seeds, and prompts "
        "for all seeds together.</p>"
    )


def _provenance(results: Mapping[str, Any]) -> str:
    return (
        f"<h2>Provenance</h2>\n{listing(origin_of(results))}\n"
        + folded("Heads", results["heads"])
        + folded("Comparison", results["comparison"])
        + folded("Resolved experiment", results["experiment"])
    )
