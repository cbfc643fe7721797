"""Show the results of a comparison: its tables, its plots and its page.

Works on the results alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
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
from falcon_lab.report.plots import COLOURS, MARKERS, STYLES, Curve, Panel, line_plot
from falcon_lab.report.tables import NOTHING, Column, Table, decimals, interval, times, wrap
from falcon_lab.studies.compare.paper import LABELS
from falcon_lab.studies.compare.plan import BEST

Results = Mapping[str, Any]
Row = Mapping[str, Any]

HEAD = Column("head", lambda row: name_of(row["head"], row))
PROMPTS = Column("prompts", "prompt_set", left=True)
"""Of a table with several prompt sets."""
BUDGET, TEMPERATURE = Column("budget", "budget"), Column("T", "temperature", "{:g}".format)


def _answers(row: Row) -> Row:
    """Return a row that counts answers: one of every seed to a prompt."""
    return {**row, "prompts": row["prompts"] * len(row["seeds"])}


def _draft_and_verify(row: Row) -> str:
    split = row["time_split"]
    return f"{split['draft']:.0f}/{split['verify']:.0f}" if split else NOTHING


COLUMNS = (
    SPEEDUP,
    TAU,
    TAU_DRAFT,
    ALPHA,
    NODES,
    PASSES,
    Column("round", "round_steps", decimals(2)),
    Column("ms", "round_seconds", decimals(0, scale=1000)),
    Column("draft/verify %", _draft_and_verify),
    Column(
        "identical",
        lambda row: identical(_answers(row)),
        left=True,
    ),
)
"""Of a head with a budget, behind its place."""

DETAILS = (ACCEPTED, Column("MiB", "peak_bytes", decimals(1, scale=1 / 2**20)))


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

NODES_AXIS = ("nodes_per_round", "draft tokens verified per round", 1.0)
ROUND_AXIS = ("round_seconds", "milliseconds of a round", 1000.0)
"""Figure of a row, what an axis calls it, and its unit."""

ABREAST = 2
"""Panels of a picture side by side."""

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
        "round: its time in steps of plain decoding; ms: in milliseconds, both with their share of "
        "the prefill. MiB: memory of one more answer at its highest point. best: chosen on other "
        "prompts.",
    ]
    blocks = [
        rows_table(results).text(),
        details_table(results).text(),
        heads_table(results).text(),
        "\n".join(ahead(results)),
        _format_paper(results["paper"]) if results["paper"] else "",
        wrap([*notes, *exclamations(warnings(results))]),
    ]
    return "\n\n".join(filter(None, blocks))


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Sort by temperature, then prompt set and budget as configured, then speed."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    sets = prompt_sets(rows)

    def place(row: Row) -> tuple[float, int, int, float]:
        return (
            row["temperature"],
            sets.index(row["prompt_set"]),
            budgets.index(row["budget"]),
            -row["speedup"]["ratio"],
        )

    return sorted(rows, key=place)


def prompt_sets(rows: Sequence[Row]) -> list[str]:
    """Return the prompt sets in the order of the configuration."""
    return list(dict.fromkeys(row["prompt_set"] for row in rows))


def of_several_sets(rows: Sequence[Row]) -> bool:
    """Return whether prompt sets must be named to tell rows apart."""
    return len(prompt_sets(rows)) > 1


def place_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that say what a row is of; prompt sets are named if there are several."""
    return [HEAD, *([PROMPTS] if of_several_sets(rows) else []), BUDGET, TEMPERATURE]


def at(row: Row) -> tuple[float, str, str]:
    """Return what heads are compared at: temperature, prompt set and budget."""
    return row["temperature"], row["prompt_set"], row["budget"]


def rows_table(results: Results) -> Table:
    """Return the main table; the fastest head of every budget stands out."""
    rows = ordered(results["rows"])
    fastest = {at(row): row for row in reversed(rows)}.values()
    columns = (*place_columns(rows), *COLUMNS)
    return Table(columns, rows, marked=lambda row: any(row is top for top in fastest))


def details_table(results: Results) -> Table:
    """Return the table of acceptance by place, and of memory."""
    rows = ordered(results["rows"])
    return Table((*place_columns(rows), *DETAILS), rows)


def heads_table(results: Results) -> Table:
    """Return the table of what training took, and of the best budgets."""
    return Table(HEADS, [{"name": name, **head} for name, head in results["heads"].items()])


def ahead(results: Results) -> list[str]:
    """Return what the intervals support about the fastest head at every budget."""
    lines = []
    rows = ordered(results["rows"])
    for place in dict.fromkeys(map(at, rows)):
        top = next(row for row in rows if at(row) == place)
        over = [
            f"{pair['than']} {times(pair['speedup'])}{'' if pair['faster'] else ' (not clear)'}"
            for pair in _rivals(results, top)
        ]
        if over:
            temperature, prompts, budget = place
            of = f"{prompts} " if of_several_sets(rows) else ""
            lines.append(f"T={temperature:g} {of}{budget}: {top['head']} over {', '.join(over)}")
    return lines


def _rivals(results: Results, row: Row) -> list[Mapping[str, Any]]:
    """Return the comparisons in which a row is the faster one."""
    keys = ("prompt_set", "temperature", "budget", "head")
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
    parting = [
        row
        for row in results["rows"]
        if row["lossless"] and row["identical_share"] not in (None, 1)
    ]
    at_ties = [row for row in parting if parts_at_ties_alone(_answers(row))]
    for row in (row for row in parting if row not in at_ties):
        margin = row["largest_margin"]
        found.append(
            f"{row['head']} {row['budget']} differs from plain decoding on "
            f"{100 * (1 - row['identical_share']):.0f} % of its answers (widest logit margin there "
            f"{NOTHING if margin is None else f'{margin:.4f}'})."
        )
    if at_ties:
        widest = max(row["largest_margin"] for row in at_ties)
        heads = dict.fromkeys(row["head"] for row in at_ties)
        found.append(
            "Some answers part from plain decoding at ties, which rounding decides (widest logit "
            f"margin there {widest:.4f}): of {', '.join(heads)}."
        )
    found += [f"{name} is left out: {why}." for name, why in results["left_out"].items()]
    return found


# --- plots --------------------------------------------------------------------------------------


def speed_against(axis: tuple[str, str, float], rows: Sequence[Row]) -> str:
    """Draw a panel for every prompt set and temperature.

    A head is a line over its budgets, or a mark if it has one; its best budget is a star.

    Args:
        axis: ``NODES_AXIS`` or ``ROUND_AXIS``.
        rows: of the results.
    """
    key, label, unit = axis
    drafting = [row for row in rows if row[key] is not None]
    heads = list(dict.fromkeys(row["head"] for row in rows))
    forms = [(c, *shape) for shape in zip(STYLES, MARKERS, strict=True) for c in COLOURS]
    sets = prompt_sets(rows)
    temperatures = sorted({row["temperature"] for row in drafting})
    panels = [
        Panel(
            [
                line
                for head, form in zip(heads, cycle(forms), strict=False)
                for line in _lines(
                    (key, unit),
                    [
                        row
                        for row in drafting
                        if (row["head"], row["prompt_set"], row["temperature"])
                        == (head, prompts, temperature)
                    ],
                    *form,
                )
            ],
            (f"{prompts}, " if of_several_sets(rows) else "")
            + ("greedy" if temperature == 0 else f"temperature {temperature:g}"),
            label,
            "" if place % ABREAST else "speed-up over plain decoding",
            level=1,
            log="x" if axis is NODES_AXIS else "",
        )
        for place, (temperature, prompts) in enumerate(product(temperatures, sets))
    ]
    columns = min(len(panels), ABREAST)
    return line_plot(
        panels,
        key,
        width=5 * columns + 2,
        height=4,
        columns=columns,
        share_y=True,
        legend_beside=True,
    )


def _lines(
    figure: tuple[str, float], rows: Sequence[Row], colour: str, style: str, marker: str
) -> list[Curve]:
    """Return a head's line with its interval, and the star of its best budget."""
    if not rows:
        return []
    key, unit = figure
    grid = sorted((row for row in rows if row["budget"] != BEST), key=lambda row: row[key])
    best = [row for row in rows if row["budget"] == BEST]
    x = [unit * row[key] for row in grid]
    ratio, low, high = ([row["speedup"][end] for row in grid] for end in ("ratio", "low", "high"))
    stars = [row["speedup"]["ratio"] for row in best]
    return [
        Curve(
            x,
            ratio,
            colour,
            name_of(rows[0]["head"], rows[0]),
            low,
            high,
            interval="whiskers" if len(grid) == 1 else "band",
            style=style,
            marker=marker,
            size=4 if len(grid) > 1 else 6,
        ),
        Curve([unit * row[key] for row in best], stars, colour, style="", marker="*", size=11),
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
        acceptance=details_table(results),
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
    several = of_several_sets(rows)
    rows = [row for row in rows if at(row)[:2] == at(rows[0])[:2]]
    rows = [row for row in rows if row["budget"] == BEST] or rows
    top = max(rows, key=lambda row: row["speedup"]["ratio"])
    text = (
        f"{name_of(top['head'], top)} is the fastest of {len(results['heads'])} "
        f"heads at {times(top['speedup'])} ({top['budget']}"
        f"{', ' + top['prompt_set'] if several else ''})"
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
    sets = results["protocol"]["prompts"].items()
    of = " of {}".format if len(sets) > 1 else (lambda name: "")
    prompts = " and ".join(f"{number} prompts{of(name)}" for name, number in sets)
    return f"{(results['target'] or {}).get('name')} on {setting(results, [prompts, trainings])}."
