"""The report of a comparison: one HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from falcon_lab.comparing import table as text
from falcon_lab.comparing.budgets import BEST
from falcon_lab.comparing.paper import LABELS
from falcon_lab.comparing.picture import NODES, ROUND, speed_against
from falcon_lab.evaluation.metrics import DEFINITIONS
from falcon_lab.evaluation.table import NOTHING, speedup_text
from falcon_lab.reporting.comparison import figure, table
from falcon_lab.reporting.page import banner, folded, header, listing, origin_of, page
from falcon_lab.reporting.results import write_atomically

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
