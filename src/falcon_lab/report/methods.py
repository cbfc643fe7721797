"""What tables, pages and cards show of the ``methods`` of ``results.json``.

A record is the summary of one method, as ``falcon_lab.measure.metrics.MethodSummary`` has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from falcon_lab.config.schema import dtype_name
from falcon_lab.measure.metrics import DEFINITIONS
from falcon_lab.pretraining.tuned import tuning_sentence
from falcon_lab.report.tables import Cell, Column, Table, decimals, percent, shares, times

Summary = Mapping[str, Any]


NAMES = {
    "tokens_per_second": "tok/s",
    "decode_tokens_per_second": "decoding tok/s",
    "speedup": "speed-up",
    "tau": "τ",
    "tau_draft": "τ draft",
    "alpha": "α",
    "acceptance": "accepted at i",
    "acceptance_conditional": "… given i-1",
    "nodes_per_round": "nodes",
    "passes_per_round": "passes",
    "layers_per_token": "layers",
    "time_split": "time split",
    "identical_share": "identical",
    "divergence_rate": "divergence rate",
    "largest_margin": "widest margin",
    "ties": "ties",
    "distinct": "distinct tokens",
}
"""Metric -> what pages and cards call it."""


def definitions(metrics: Iterable[str]) -> dict[str, str]:
    """Return what the figures mean, by the names that are shown."""
    return {NAMES[metric]: DEFINITIONS[metric] for metric in metrics}


def name_of(name: str, summary: Summary) -> str:
    """Return a method's name, with the label that a lossy acceptance rule must carry."""
    return name if summary["lossless"] else f"{name} (lossy)"


def named(method: str | None, methods: Mapping[str, Summary]) -> str | None:
    """Return ``name_of`` one of several methods; a name that is none of them stays as it is."""
    return method if method is None or method not in methods else name_of(method, methods[method])


def identical(summary: Summary) -> str | None:
    """Write on how many prompts the tokens were plain decoding's; None where it is unknown."""
    share = summary["identical_share"]
    if share is None or share == 1:
        return None if share is None else "yes"
    found = f"{round(share * summary['prompts'])} of {summary['prompts']}"
    return f"{found}, else ties" if parts_at_ties_alone(summary) else f"no: {found}"


def parts_at_ties_alone(summary: Summary) -> bool:
    """Return whether rounding explains every text that is not plain decoding's."""
    differing = round((1 - summary["identical_share"]) * summary["prompts"])
    return 0 < differing == summary.get("ties", 0)


def of_split(part: str, digits: int = 0) -> Column:
    """Return the column of a part of the decoding time, in percent."""
    header = {"accept_commit": "commit", "overhead": "other %"}.get(part, part)
    return Column(header, lambda s: s["time_split"][part], decimals(digits))


METHOD = Column("method", lambda s: name_of(s["method"], s))
SPEED = Column("tok/s", "tokens_per_second", decimals(1))
SPEEDUP = Column("speed-up [95 %]", "speedup", times)
TAU = Column("τ", "tau", decimals(2))
TAU_DRAFT = Column("τ draft", "tau_draft", decimals(2))
ALPHA = Column("α %", "alpha", percent(1))
NODES = Column("nodes", "nodes_per_round", decimals(1))
PASSES = Column("passes", "passes_per_round", decimals(1))
LAYERS = Column("layers", lambda s: s.get("layers_per_token"), decimals(1))
ACCEPTED = Column("accepted at 1, 2, … %", "acceptance", shares, left=True)
IDENTICAL = Column("identical", identical, left=True)

FIGURES = (SPEED, SPEEDUP, TAU, TAU_DRAFT, ALPHA)
WORK = (
    *(of_split(part) for part in ("draft", "verify", "accept_commit", "overhead")),
    NODES,
    PASSES,
)


def work(summaries: Sequence[Summary]) -> tuple[Column, ...]:
    """Return the columns of what rounds do; layers where a method drafts with the target's own."""
    counted = any(summary.get("layers_per_token") for summary in summaries)
    return (*WORK, LAYERS) if counted else WORK


def method_column(labels: Mapping[str, str]) -> Column:
    """Return the column of names for HTML, with what each method is in small print."""

    def cell(summary: Summary) -> Cell:
        name = summary["method"]
        return Cell(name, labels.get(name, ""), "" if summary["lossless"] else "lossy")

    return Column("method", cell, lambda shown: shown)


def drafting(results: Mapping[str, Any]) -> list[Summary]:
    """Return the methods whose time is known part by part."""
    return [s for s in results["methods"].values() if s["time_split"] is not None]


def format_table(results: Mapping[str, Any]) -> str:
    """Write the tables that a run ends with: speed first, then where it comes from.

    Args:
        results: with ``methods`` (method -> summary), and, where there are any, ``left_out`` and
            ``target``.
    """
    notes = [
        "Speed-up: wall time per token against plain decoding in the same loop, prefill included. "
        "τ counts the target's own token, τ draft does not; α = accepted/(accepted + rounds). "
        "Times in % of decoding; commit holds acceptance; nodes (draft tokens verified) and passes "
        "(of the drafter) per round; layers (that the target's passes go through, in drafting too) "
        "per token.",
        *exclamations(warnings(results)),
        *left_out(results),
    ]
    tables = [Table((METHOD, *FIGURES, IDENTICAL), list(results["methods"].values()))]
    if found := drafting(results):
        tables.append(Table((METHOD, *work(found), ACCEPTED), found))
    return join(tables, notes)


def join(tables: Sequence[Table], notes: Sequence[str]) -> str:
    """Write tables one below the other, with notes on all of them at the end."""
    last = Table(tables[-1].columns, tables[-1].records, notes)
    return "\n\n".join(table.text() for table in (*tables[:-1], last))


def exclamations(found: Sequence[str]) -> list[str]:
    """Mark warnings among the notes of a table."""
    return [f"! {line}" for line in found]


def left_out(results: Mapping[str, Any]) -> list[str]:
    """Return a note on every method that was not measured."""
    return [f"Left out: {n} ({why})" for n, why in (results.get("left_out") or {}).items()]


def target_warnings(results: Mapping[str, Any]) -> list[str]:
    """Warn of a target that did not pass its quality gate, and of one that was tuned."""
    target = results.get("target") or {}
    quality, tuning, found = target.get("quality"), target.get("tuning"), []
    if quality and not quality["passed"]:
        found.append(f"The target did not pass its quality gate: {quality['verdict'].rstrip('.')}.")
    if tuning:
        found.append(
            f"Output is compared with the tuned target's, not with its parent's: {target['name']} "
            f"({target['fingerprint']}) is {tuning_sentence(tuning)}."
        )
    return found


def lossy_warning(name: str) -> str:
    """Warn of what it means that a method is lossy."""
    return f"{name} is lossy: its output does not follow the target's."


def warnings(results: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before believing the figures, a sentence each."""
    found = target_warnings(results)
    for name, s in results["methods"].items():
        if not s["lossless"]:
            found.append(lossy_warning(name))
        share = s["identical_share"]
        if share is not None and share < 1:
            margin = s["largest_margin"]
            gap = "" if margin is None else f"; widest logit margin there {margin:.2g}"
            differing = f"{round((1 - share) * s['prompts'])} of {s['prompts']} prompts"
            rate = f"{1000 * s['divergence_rate']:.2g} first differences per 1000 tokens"
            found.append(
                f"{name} parts from plain decoding at ties alone, which rounding decides: on "
                f"{differing} ({rate}{gap})."
                if parts_at_ties_alone(s)
                else f"{name} differs from plain decoding on {differing} ({rate}{gap})."
            )
        if not s["repeats_agree"]:
            found.append(f"{name} did not write the same tokens in every repeat.")
    return found


def headline(results: Mapping[str, Any]) -> str:
    """Return one sentence with the measured figure and no more than it supports."""
    name = results["headline"]
    target = (results["target"] or {}).get("name") or "the target"
    if name is None or results["methods"][name]["speedup"] is None:
        return f"No speed-up was measured for {target}."
    s = results["methods"][name]
    speedup = s["speedup"]
    text = f"{name} decodes {target} at {speedup['ratio']:.2f}× the speed of plain decoding"
    if speedup["low"] is None:
        return f"{text} on one prompt, which gives no interval."
    text += f" (95 % interval {speedup['low']:.2f}–{speedup['high']:.2f})"
    if not s["lossless"]:
        return f"{text}, with a lossy rule."
    if s["identical_share"] is None:
        return f"{text}, drawing from the target's own distribution."
    if parts_at_ties_alone(s):
        return f"{text}, with the same output but for ties that rounding decides."
    if s["identical_share"] < 1:
        return f"{text}, but not with the same output everywhere."
    return f"{text}, with the same output."


def setting(results: Mapping[str, Any], more: Sequence[str]) -> str:
    """Return where figures come from, in words between commas: machine, precision, and ``more``."""
    h = results["hardware"]
    machine = h.get("gpu") or f"{h['cpu']}, {h['threads']} of {h['cores']} cores"
    dtype = dtype_name(h.get("dtype") or "")
    return ", ".join([machine, dtype, "one sequence at a time", *more])


def hardware_sentence(results: Mapping[str, Any]) -> str:
    """Return where the figures of a run come from, in a line."""
    prompts = max((s["prompts"] for s in results["methods"].values()), default=0)
    temperature = (results["experiment"].get("evaluation") or {}).get("temperature") or 0
    mode = f"temperature {temperature:g}" if temperature else "greedy"
    return f"Measured on {setting(results, [mode, f'{prompts} prompts'])}."


def comparison_sentences(results: Mapping[str, Any], leaving_out: str) -> list[str]:
    """Return what the paired intervals support about the headline method and its rivals.

    Args:
        results: of a run.
        leaving_out: a method that speed-ups are measured against already.
    """
    name, sentences = results["headline"], []
    for found in results["comparisons"]:
        sides = found["method"], found["than"]
        if name not in sides or leaving_out in sides:
            continue
        verb = "is faster than" if found["faster"] else "is not clearly faster than"
        one, other = (named(side, results["methods"]) for side in sides)
        sentences.append(f"{one} {verb} {other}: {times(found['speedup'])}.")
    return sentences
