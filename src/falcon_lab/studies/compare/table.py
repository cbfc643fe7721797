"""A comparison as aligned plain text. Works on the results alone; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from falcon_lab.studies.compare.paper import LABELS
from falcon_lab.studies.evaluate import (
    NOTHING,
    align,
    identical_text,
    lossy_warning,
    number,
    percent,
    quality_warnings,
    speedup_text,
)

ROWS = (
    "head",
    "budget",
    "T",
    "speed-up [95 %]",
    "τ",
    "τ draft",
    "α %",
    "nodes",
    "passes",
    "round",
    "draft/verify %",
    "identical",
)
DETAILS = ("head", "budget", "T", "accepted at 1, 2, … %", "MiB")
HEADS = ("head", "k", "parameters", "seeds", "training tokens", "training s", "best")
ORDER = ("order", "the paper", "ours [95 %]", "verdict")
MIB = 2**20


def format_comparison(results: Mapping[str, Any]) -> str:
    """The tables of a comparison.

    Args:
        results: of ``compare``.
    """
    blocks = [
        align([ROWS, *(cells(row) for row in ordered(results["rows"]))]),
        align([DETAILS, *(detail_cells(row) for row in ordered(results["rows"]))]),
        align([HEADS, *(head_cells(name, head) for name, head in results["heads"].items())]),
        "\n".join(ahead(results)),
    ]
    if results["paper"]:
        blocks.append(format_paper(results["paper"]))
    return "\n\n".join([*filter(None, blocks), "\n".join(_notes(results))])


def ordered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By temperature, then budget as they were asked for, the fastest head first."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    return sorted(
        rows,
        key=lambda r: (r["temperature"], budgets.index(r["budget"]), -r["speedup"]["ratio"]),
    )


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A head with a budget."""
    split = row["time_split"] or {}
    return (
        *_place(row),
        speedup_text(row["speedup"]),
        number(row["tau"], 2),
        number(row["tau_draft"], 2),
        NOTHING if row["alpha"] is None else number(100 * row["alpha"], 1),
        number(row["nodes_per_round"], 1),
        number(row["passes_per_round"], 1),
        number(row["round_steps"], 2),
        f"{number(split.get('draft'), 0)}/{number(split.get('verify'), 0)}",
        identical_text({**row, "prompts": row["prompts"] * len(row["seeds"])}),
    )


def detail_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """More of a head with a budget."""
    peak = row["peak_bytes"]
    return (
        *_place(row),
        " ".join(percent(share) for share in row["acceptance"]) or NOTHING,
        NOTHING if peak is None else number(peak / MIB, 1),
    )


def _place(row: Mapping[str, Any]) -> tuple[str, ...]:
    return named(row["head"], row["lossless"]), row["budget"], f"{row['temperature']:g}"


def named(head: str, lossless: bool) -> str:
    """A lossy rule says so wherever its head is named."""
    return head if lossless else f"{head} (lossy)"


def head_cells(name: str, head: Mapping[str, Any]) -> tuple[str, ...]:
    """A head's trainings and its best budgets."""
    trainings = head["trainings"]
    known = [t["seconds"] for t in trainings if t["seconds"] is not None]
    best = (f"{found['budget']} (T={t})" for t, found in head["best"].items())
    return (
        name,
        str(head["block"]),
        f"{head['parameters']:,}",
        " ".join(str(t["seed"]) for t in trainings) or "none",
        f"{trainings[0]['tokens']:,}" if trainings else "none",
        number(sum(known) / len(known), 0) if known else NOTHING,
        ", ".join(best) or NOTHING,
    )


def ahead(results: Mapping[str, Any]) -> list[str]:
    """At every budget, what may be said about the fastest head."""
    lines = []
    rows = ordered(results["rows"])
    for temperature, budget in dict.fromkeys((r["temperature"], r["budget"]) for r in rows):
        at = [r for r in rows if (r["temperature"], r["budget"]) == (temperature, budget)]
        over = [
            f"{p['than']} {speedup_text(p['speedup'])}{'' if p['faster'] else ' (not clear)'}"
            for p in results["pairs"]
            if (p["temperature"], p["budget"], p["head"]) == (temperature, budget, at[0]["head"])
        ]
        if over:
            lines.append(f"T={temperature:g} {budget}: {at[0]['head']} over {', '.join(over)}")
    return lines


def format_paper(paper: Mapping[str, Any]) -> str:
    """The paper's figures beside ours, and what becomes of their order."""
    blocks = [f"{paper['source']}, beside ours at temperature {paper['temperature']:g}"]
    for found in paper["metrics"]:
        columns = list(found["rows"][0]["published"]) if found["rows"] else []
        label = LABELS[found["metric"]]
        head = (label, *columns, "ours [95 %]")
        blocks.append(align([head, *(_published(row, columns) for row in found["rows"])]))
        pairs = [ORDER, *map(order_cells, found["pairs"])]
        blocks.append(f"{align(pairs)}\norder of {label}: {found['verdict']}")
    blocks += [f"Note: {note}" for note in paper["notes"]]
    return "\n\n".join(blocks)


def _published(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    figures = (row["published"][column] for column in columns)
    said = (NOTHING if figure is None else f"{figure:g}" for figure in figures)
    return (row["row"], *said, interval(row["ours"]))


def order_cells(pair: Mapping[str, Any]) -> tuple[str, ...]:
    """Two rows whose order the paper tells."""
    published = pair["published"]
    said = NOTHING if published is None else f"{published[0]:.2f}–{published[1]:.2f}"
    return (
        f"{pair['above']} > {pair['below']}",
        said,
        interval(pair["ours"]),
        pair["verdict"],
    )


def interval(found: Mapping[str, Any] | None) -> str:
    """``2.31 [2.20, 2.43]``."""
    if found is None or found["ratio"] is None:
        return NOTHING
    return speedup_text(found).replace("×", "")


def _notes(results: Mapping[str, Any]) -> list[str]:
    notes = [
        "Speed-up: wall time per token against plain decoding in the same loop, prefill included; "
        "intervals are a bootstrap",
        "over training seeds and prompts. τ counts the target's own token, τ draft does not; "
        "α = accepted/(accepted + rounds).",
        "round: its time in steps of plain decoding. MiB: memory of one more answer at its highest "
        "point. best: chosen on other prompts.",
    ]
    return notes + [f"! {line}" for line in warnings(results)]


def warnings(results: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures, a sentence each."""
    found = quality_warnings(results)
    lossy = dict.fromkeys(row["head"] for row in results["rows"] if not row["lossless"])
    found += map(lossy_warning, lossy)
    for row in results["rows"]:
        share = row["identical_share"]
        if row["lossless"] and share is not None and share < 1:
            found.append(
                f"{row['head']} {row['budget']} differs from plain decoding on "
                f"{percent(1 - share)} % of its answers (widest logit margin there "
                f"{number(row['largest_margin'], 4)})."
            )
    found += [f"{name} is left out: {why}." for name, why in results["left_out"].items()]
    return found
