"""``report.html``: one file that opens anywhere, without network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falcon_lab.config.saved import REPORT
from falcon_lab.config.schema import HF_GENERATE, PLAIN
from falcon_lab.files import write_atomically
from falcon_lab.measure.metrics import DEFINITIONS
from falcon_lab.measure.results import records_of
from falcon_lab.report import method_plots, page
from falcon_lab.report.methods import (
    ACCEPTED,
    FIGURES,
    IDENTICAL,
    SPEED,
    comparison_sentences,
    definitions,
    drafting,
    hardware_sentence,
    headline,
    method_column,
    named,
    warnings,
    work,
)
from falcon_lab.report.tables import Column, Table, decimals, percent
from falcon_lab.report.tree_drawing import draw_svg

EXAMPLES = 3
DECODING_SPEED = Column("decoding tok/s", "decode_tokens_per_second", decimals(1))
DISTINCT = Column("distinct tokens %", "distinct", percent())
ROUNDS = Column("rounds", "rounds")


def write_report(
    folder: Path,
    results: Mapping[str, Any],
    history: list[dict[str, Any]],
    trees: Sequence[Mapping[str, Any]],
) -> Path:
    """Write ``folder/report.html``.

    Args:
        folder: of the run.
        results: the content of ``results.json``.
        history: training curves, from ``read_history``; empty when nothing was trained.
        trees: from ``TreeRecorder``; each is drawn.

    Raises:
        FalconLabError: when the file cannot be written.
    """
    return write_atomically(folder / REPORT, render(results, history, trees))


def render(
    results: Mapping[str, Any],
    history: list[dict[str, Any]],
    trees: Sequence[Mapping[str, Any]],
) -> str:
    """Return the whole page."""
    methods = results["methods"]
    seeds = ", ".join(f"{name} {seed}" for name, seed in results["seeds"].items())
    return page.render(
        "report.html",
        results=results,
        title=(results["experiment"].get("report") or {}).get("title") or results["name"] or "run",
        headline=headline(results),
        lead=hardware_sentence(results),
        warnings=warnings(results),
        assurance=_assurance(results),
        comparison=_table(results, list(methods.values()), _SPEEDS),
        rivals=" ".join(comparison_sentences(results, PLAIN)),
        work=_table(results, drafting(results), (*work(drafting(results)), ROUNDS, ACCEPTED)),
        plots={name: plot(methods) for name, plot in _PLOTS.items()},
        hf_generate=HF_GENERATE,
        curves=method_plots.training_curves(history),
        trees=[(draw_svg(tree), _about(tree, methods)) for tree in trees],
        examples=_examples(results),
        definitions=definitions(DEFINITIONS),
        origin=page.origin_of(results) | {"seeds": seeds},
        details={
            "Resolved experiment": results["experiment"],
            "Components": results["components"],
        },
    )


_SPEEDS = (SPEED, DECODING_SPEED, *FIGURES[1:], IDENTICAL, DISTINCT)
_PLOTS = {
    "speedups": method_plots.speedups,
    "time_split": method_plots.time_split,
    "acceptance": method_plots.acceptance,
    "histogram": method_plots.accepted_histograms,
}


def _table(
    results: Mapping[str, Any], records: Sequence[Mapping[str, Any]], columns: Sequence[Column]
) -> Table:
    return Table(
        (method_column(results["labels"]), *columns),
        records,
        marked=lambda summary: summary["method"] == results["headline"],
    )


def _assurance(results: Mapping[str, Any]) -> str:
    """Return what a page without warnings states."""
    quality = (results["target"] or {}).get("quality")
    judged = any(s["identical_share"] is not None for s in results["methods"].values())
    found = ["Every method wrote plain decoding's tokens, on every prompt."] if judged else []
    if quality:
        found.append(f"The target passed its quality gate: {quality['verdict'].rstrip('.')}.")
    return " ".join(found)


def _about(tree: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    drafted, accepted = len(tree["tokens"]) - 1, len(tree["accepted"]) - 1
    text = f"{drafted} draft tokens, {accepted} accepted"
    about = {**tree, "method": named(tree.get("method"), methods)}
    where = [f"{k} {about[k]}" for k in ("method", "prompt", "round") if about.get(k) is not None]
    return f"{text} — {', '.join(where)}" if where else text


def _examples(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return answers of plain decoding and the headline method, differing ones first."""
    name = results["headline"]
    if name is None or PLAIN not in results["methods"]:
        return []
    pairs = list(zip(records_of(results, PLAIN), records_of(results, name), strict=True))
    pairs.sort(key=lambda pair: pair[1].identical is not False)
    verdict = {True: "identical", False: "different", None: "drawn independently"}
    return [
        {
            "about": f"{plain.prompt} ({plain.category}): {verdict[other.identical]}",
            "answers": [
                {
                    "about": f"{row.method} · {len(row.tokens)} tokens · "
                    f"{1000 * row.times.wall:.0f} ms · ends by {row.turns[-1].finish}",
                    "texts": [turn.text for turn in row.turns],
                }
                for row in (plain, other)
            ],
        }
        for plain, other in pairs[:EXAMPLES]
    ]
