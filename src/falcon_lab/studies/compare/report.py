"""Show the results of a comparison: its tables, its plots and its page.

Works on the results alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from falcon_lab.files import write_atomically
from falcon_lab.report import page
from falcon_lab.report.methods import (
    ACCEPTED,
    ALPHA,
    NODES,
    PASSES,
    SPEEDUP,
    TAU,
    TAU_DRAFT,
    definitions,
    exclamations,
    identical,
    lossy_warning,
    name_of,
    parts_at_ties_alone,
    setting,
    target_warnings,
)
from falcon_lab.report.plots import COLOURS, STYLES, Curve, Panel, line_plot
from falcon_lab.report.tables import NOTHING, Column, Table, decimals, interval, times, wrap
from falcon_lab.studies.compare.paper import LABELS
from falcon_lab.studies.compare.plan import BEST

Results = Mapping[str, Any]
Row = Mapping[str, Any]

PLACE = (
    Column("head", lambda row: name_of(row["head"], row)),
    Column("budget", "budget"),
    Column("T", "temperature", "{:g}".format),
)


def _answers(row: Row) -> Row:
    """Return a row that counts answers: one of every seed to a prompt."""
    return {**row, "prompts": row["prompts"] * len(row["seeds"])}


def _draft_and_verify(row: Row) -> str:
    split = row["time_split"]
    return f"{split['draft']:.0f}/{split['verify']:.0f}" if split else NOTHING


COLUMNS = (
    *PLACE,
    SPEEDUP,
    TAU,
    TAU_DRAFT,
    ALPHA,
    NODES,
    PASSES,
    Column("round", "round_steps", decimals(2)),
    Column("draft/verify %", _draft_and_verify),
    Column(
        "identical",
        lambda row: identical(_answers(row)),
        left=True,
    ),
)
"""Of a head with a budget."""

DETAILS = (*PLACE, ACCEPTED, Column("MiB", "peak_bytes", decimals(1, scale=1 / 2**20)))


def _seconds(head: Mapping[str, Any]) -> float | None:
    known = [t["seconds"] for t in head["trainings"] if t["seconds"] is not None]
    return sum(known) / len(known) if known else None


def _validated(head: Mapping[str, Any]) -> str | None:
    """Mean and range, over the seeds, of the last validation's acceptance rate."""
    known = [t.get("validation", {}).get("val/accept_rate") for t in head["trainings"]]
    found = [100 * rate for rate in known if rate is not None]
    if not found:
        return None
    return f"{sum(found) / len(found):.1f} [{min(found):.1f}, {max(found):.1f}]"


HEADS = (
    Column("head", "name"),
    Column("k", "block"),
    Column("parameters", "parameters", "{:,}".format),
    Column("seeds", lambda head: " ".join(str(t["seed"]) for t in head["trainings"]) or "none"),
    Column(
        "training tokens",
        lambda head: f"{head['trainings'][0]['tokens']:,}" if head["trainings"] else "none",
    ),
    Column("training s", _seconds, decimals(0)),
    Column("val accept % [seeds]", _validated),
    Column(
        "best",
        lambda head: ", ".join(f"{b['budget']} (T={t})" for t, b in head["best"].items()) or None,
        left=True,
    ),
)

ORDER = (
    Column("order", lambda pair: f"{pair['above']} > {pair['below']}"),
    Column("the paper", "published", lambda found: f"{found[0]:.2f}–{found[1]:.2f}"),
    Column("ours [95 %]", "ours", interval),
    Column("verdict", "verdict", left=True),
)

NODES_AXIS = ("nodes_per_round", "draft tokens verified per round")
ROUND_AXIS = ("round_steps", "time of a round, in steps of plain decoding")
"""Figure of a row -> what an axis calls it."""

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


# --- tables -------------------------------------------------------------------------------------


def format_comparison(results: Results) -> str:
    """Write the tables of a comparison.

    Args:
        results: of ``compare``.
    """
    notes = [
        "Speed-up: wall time per token against plain decoding in the same loop, prefill included; "
        "intervals are a bootstrap over training seeds and prompts. τ counts the target's own "
        "token, τ draft does not; α = accepted/(accepted + rounds).",
        "round: its time in steps of plain decoding. MiB: memory of one more answer at its highest "
        "point. best: chosen on other prompts.",
    ]
    blocks = [
        rows_table(results).text(),
        Table(DETAILS, ordered(results["rows"])).text(),
        heads_table(results).text(),
        "\n".join(ahead(results)),
        _format_paper(results["paper"]) if results["paper"] else "",
        wrap([*notes, *exclamations(warnings(results))]),
    ]
    return "\n\n".join(filter(None, blocks))


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Sort by temperature, then budget in the order of the configuration, then speed."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    return sorted(
        rows,
        key=lambda r: (r["temperature"], budgets.index(r["budget"]), -r["speedup"]["ratio"]),
    )


def rows_table(results: Results) -> Table:
    """Return the main table; the fastest head of every budget stands out."""
    rows = ordered(results["rows"])
    fastest = {(row["temperature"], row["budget"]): row for row in reversed(rows)}.values()
    return Table(COLUMNS, rows, marked=lambda row: any(row is top for top in fastest))


def heads_table(results: Results) -> Table:
    """Return the table of what training took, and of the best budgets."""
    return Table(HEADS, [{"name": name, **head} for name, head in results["heads"].items()])


def ahead(results: Results) -> list[str]:
    """Return what the intervals support about the fastest head at every budget."""
    lines = []
    rows = ordered(results["rows"])
    for temperature, budget in dict.fromkeys((r["temperature"], r["budget"]) for r in rows):
        top = next(r for r in rows if (r["temperature"], r["budget"]) == (temperature, budget))
        over = [
            f"{pair['than']} {times(pair['speedup'])}{'' if pair['faster'] else ' (not clear)'}"
            for pair in _rivals(results, top)
        ]
        if over:
            lines.append(f"T={temperature:g} {budget}: {top['head']} over {', '.join(over)}")
    return lines


def _rivals(results: Results, row: Row) -> list[Mapping[str, Any]]:
    """Return the comparisons in which a row is the faster one."""
    keys = ("temperature", "budget", "head")
    return [p for p in results["pairs"] if all(p[key] == row[key] for key in keys)]


def paper_table(metric: Mapping[str, Any]) -> Table:
    """Return the published figures of a metric beside ours."""
    rows = []
    for row in metric["rows"]:
        published = (None if f is None else f"{f:g}" for f in row["published"].values())
        ours = row["ours"] if row["ours"] and row["ours"]["ratio"] is not None else None
        rows.append([row["row"], *published, ours and interval(ours)])
    columns = metric["rows"][0]["published"] if rows else ()
    return Table.of((LABELS[metric["metric"]], *columns, "ours [95 %]"), rows)


def _format_paper(paper: Mapping[str, Any]) -> str:
    """Write the paper's figures beside ours, and what becomes of their order."""
    blocks = [f"{paper['source']}, beside ours at temperature {paper['temperature']:g}"]
    for metric in paper["metrics"]:
        verdict = f"order of {LABELS[metric['metric']]}: {metric['verdict']}"
        blocks += [paper_table(metric).text(), f"{Table(ORDER, metric['pairs'])}\n{verdict}"]
    blocks += [f"Note: {note}" for note in paper["notes"]]
    return "\n\n".join(blocks)


def warnings(results: Results) -> list[str]:
    """Return what a reader must know before believing the figures, a sentence each."""
    found = target_warnings(results)
    lossy = dict.fromkeys(row["head"] for row in results["rows"] if not row["lossless"])
    found += map(lossy_warning, lossy)
    for row in results["rows"]:
        share, margin = row["identical_share"], row["largest_margin"]
        if row["lossless"] and share is not None and share < 1:
            ties = parts_at_ties_alone(_answers(row))
            how = "parts at ties, which rounding decides, from" if ties else "differs from"
            found.append(
                f"{row['head']} {row['budget']} {how} plain decoding on "
                f"{100 * (1 - share):.0f} % of its answers (widest logit margin there "
                f"{NOTHING if margin is None else f'{margin:.4f}'})."
            )
    found += [f"{name} is left out: {why}." for name, why in results["left_out"].items()]
    return found


# --- plots --------------------------------------------------------------------------------------


def speed_against(axis: tuple[str, str], rows: Sequence[Row]) -> str:
    """Draw a panel for every temperature; a line for every head, its best budget as a star.

    Args:
        axis: ``NODES_AXIS`` or ``ROUND_AXIS``.
        rows: of the results.
    """
    key, label = axis
    drafting = [row for row in rows if row[key] is not None]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    forms = [(colour, style) for style in STYLES for colour in COLOURS]
    temperatures = sorted({row["temperature"] for row in drafting})
    panels = [
        Panel(
            [
                line
                for head, form in zip(heads, cycle(forms), strict=False)
                for line in _lines(
                    key,
                    [r for r in drafting if (r["head"], r["temperature"]) == (head, temperature)],
                    *form,
                )
            ],
            "greedy" if temperature == 0 else f"temperature {temperature:g}",
            label,
            "" if place else "speed-up over plain decoding",
            level=1,
            log="x" if axis is NODES_AXIS else "",
        )
        for place, temperature in enumerate(temperatures)
    ]
    return line_plot(
        panels,
        key,
        width=5 * len(panels) + 2,
        height=4,
        columns=len(panels),
        share_y=True,
        legend_beside=True,
    )


def _lines(key: str, rows: Sequence[Row], colour: str, style: str) -> list[Curve]:
    """Return a head's line with its interval, and the star of its best budget."""
    if not rows:
        return []
    grid = sorted((row for row in rows if row["budget"] != BEST), key=lambda row: row[key])
    best = [row for row in rows if row["budget"] == BEST]
    x = [row[key] for row in grid]
    ratio, low, high = ([row["speedup"][end] for row in grid] for end in ("ratio", "low", "high"))
    stars = [row["speedup"]["ratio"] for row in best]
    return [
        Curve(x, ratio, colour, name_of(rows[0]["head"], rows[0]), low, high, style=style),
        Curve([row[key] for row in best], stars, colour, style="", marker="*", size=11),
    ]


# --- the page -----------------------------------------------------------------------------------


def write_page(path: Path, results: Results) -> Path:
    """Write the page whole or not at all.

    Args:
        path: the file.
        results: of ``compare``.

    Raises:
        FalconLabError: it cannot be written.
    """
    return write_atomically(path, render(results))


def render(results: Results) -> str:
    """Return the whole page."""
    paper = results["paper"] or {"metrics": []}
    return page.render(
        "comparison.html",
        results=results,
        title=(results["experiment"].get("report") or {}).get("title") or results["name"],
        headline=headline(results),
        lead=lead(results),
        warnings=warnings(results),
        by_nodes=speed_against(NODES_AXIS, results["rows"]),
        by_round=speed_against(ROUND_AXIS, results["rows"]),
        rows=rows_table(results),
        acceptance=Table(DETAILS, ordered(results["rows"])),
        ahead=ahead(results),
        heads=heads_table(results),
        paper=results["paper"],
        published=[
            (LABELS[m["metric"]], m["verdict"], paper_table(m), Table(ORDER, m["pairs"]))
            for m in paper["metrics"]
        ],
        definitions=definitions(DEFINED),
        origin=page.origin_of(results),
        details={
            "Heads": results["heads"],
            "Comparison": results["comparison"],
            "Resolved experiment": results["experiment"],
        },
    )


def headline(results: Results) -> str:
    """Return what the figures support: greedy, and at the best budgets if there are any."""
    rows = ordered(results["rows"])
    rows = [row for row in rows if row["temperature"] == rows[0]["temperature"]]
    rows = [row for row in rows if row["budget"] == BEST] or rows
    top = max(rows, key=lambda row: row["speedup"]["ratio"])
    text = (
        f"{name_of(top['head'], top)} is the fastest of {len(results['heads'])} "
        f"heads at {times(top['speedup'])} ({top['budget']})"
    )
    over = _rivals(results, top)
    if not over:
        return f"{text}."
    nearest = min(over, key=lambda pair: pair["speedup"]["ratio"])
    clearly = "clearly ahead of" if nearest["faster"] else "not clearly ahead of"
    return f"{text}, {clearly} {nearest['than']}: {times(nearest['speedup'])}."


def lead(results: Results) -> str:
    """Return where the figures come from, in a line."""
    seeds = max(len(row["seeds"]) for row in results["rows"])
    trainings = "one training of each head" if seeds == 1 else f"{seeds} training seeds"
    prompts = f"{results['protocol']['prompts']} prompts"
    return f"{(results['target'] or {}).get('name')} on {setting(results, [prompts, trainings])}."
