"""The tables and plots of the report that compare the methods, as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from falcon_lab.measure.results import HF_GENERATE, PLAIN
from falcon_lab.report import plots
from falcon_lab.studies.evaluate import NOTHING, identical_text, name_of, number, percent


def figure(svg: str, caption: str) -> str:
    """A plot with its caption; nothing for no plot."""
    if not svg:
        return ""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """An HTML table of cells that are HTML already; each row says whether it is the headline."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    lines = [
        f"<tr{' class=headline' if marked else ''}>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for marked, cells in rows
    ]
    body = "\n".join(lines)
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n'
        "</tbody></table></div>"
    )


def _method_cell(results: Mapping[str, Any], name: str) -> str:
    label = results["labels"].get(name, "")
    lossy = "" if results["methods"][name]["lossless"] else '<span class="tag">lossy</span>'
    small = f"<small>{escape(label)}</small>" if label else ""
    return f"{escape(name)}{lossy}{small}"


def _speedup_cell(s: Mapping[str, Any]) -> str:
    speedup = s["speedup"]
    if speedup is None:
        return NOTHING
    text = f"{speedup['ratio']:.2f}×"
    if speedup["low"] is None:
        return text
    return f"{text} <small>{speedup['low']:.2f}–{speedup['high']:.2f}</small>"


def comparison(results: Mapping[str, Any]) -> str:
    """The table of speeds, what may be said about it, and the speed-ups drawn."""
    rows = []
    for name, s in results["methods"].items():
        cells = (
            _method_cell(results, name),
            number(s["tokens_per_second"], 1),
            number(s["decode_tokens_per_second"], 1),
            _speedup_cell(s),
            number(s["tau"], 2),
            number(s["tau_draft"], 2),
            NOTHING if s["alpha"] is None else f"{100 * s['alpha']:.1f} %",
            escape(identical_text(s)),
            f"{100 * s['distinct']:.0f} %",
        )
        rows.append((name == results["headline"], cells))
    head = (
        "method",
        "tokens/s",
        "decoding<br>tokens/s",
        "speed-up<br>95 % interval",
        "τ",
        "τ draft",
        "α",
        "identical<br>output",
        "distinct<br>tokens",
    )
    return (
        f"<h2>Comparison</h2>\n{table(head, rows)}\n"
        '<p class="note">τ counts the target’s own token of every round, τ draft does not. '
        f"{escape(_faster(results))}</p>\n{_left_out(results)}"
        + figure(
            plots.speedups(results["methods"]),
            "Bars: ratio of total time per token. Whiskers: paired bootstrap over prompts.",
        )
    )


def _faster(results: Mapping[str, Any]) -> str:
    """What the paired intervals say about the headline method and its rivals."""
    name, said = results["headline"], []
    for found in results["comparisons"]:
        if name not in (found["method"], found["than"]) or PLAIN in (
            found["method"],
            found["than"],
        ):
            continue
        s = found["speedup"]
        interval = "" if s["low"] is None else f" ({s['low']:.2f}–{s['high']:.2f})"
        verb = "is faster than" if found["faster"] else "is not clearly faster than"
        one, other = (
            name_of(found[side], results["methods"][found[side]]) for side in ("method", "than")
        )
        said.append(f"{one} {verb} {other}: {s['ratio']:.2f}×{interval}.")
    return " ".join(said)


def _left_out(results: Mapping[str, Any]) -> str:
    lines = [f"{name}: {why}" for name, why in results["left_out"].items()]
    return f'<p class="note">Left out — {escape("; ".join(lines))}</p>' if lines else ""


def work(results: Mapping[str, Any]) -> str:
    """The table of times, nodes, passes and acceptance, and their plots."""
    methods = results["methods"]
    rows = []
    for name, s in methods.items():
        split = s["time_split"]
        if split is None:
            continue
        parts = ("draft", "verify", "accept_commit", "overhead")
        cells = (
            _method_cell(results, name),
            *(f"{split[part]:.0f} %" for part in parts),
            number(s["nodes_per_round"], 1),
            number(s["passes_per_round"], 1),
            str(s["rounds"]),
            " ".join(percent(share) for share in s["acceptance"]) or NOTHING,
        )
        rows.append((name == results["headline"], cells))
    head = (
        "method",
        "draft",
        "verify",
        "accept +<br>commit",
        "overhead",
        "nodes<br>per round",
        "passes<br>per round",
        "rounds",
        "accepted at 1, 2, … %",
    )
    return (
        f"<h2>Where the speed comes from</h2>\n{table(head, rows) if rows else ''}\n"
        + figure(
            plots.time_split(methods),
            f"Time per new token. Nothing is known of what happens inside {HF_GENERATE}.",
        )
        + figure(plots.acceptance(methods), "Acceptance by position of the draft token.")
        + figure(
            plots.accepted_histograms(methods),
            "A round adds one token more than it accepts: the target's own.",
        )
    )
