"""``report.html``: one file that opens anywhere, without network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from falcon_lab.files import write_atomically
from falcon_lab.measure.metrics import DEFINITIONS
from falcon_lab.measure.results import PLAIN, rows_of
from falcon_lab.report import plots
from falcon_lab.report.comparison import comparison, figure, work
from falcon_lab.report.page import banner, folded, header, listing, origin_of, page
from falcon_lab.report.sentences import hardware_sentence, headline
from falcon_lab.report.tree_drawing import draw_svg
from falcon_lab.studies.evaluate import named, warnings

EXAMPLES = 3
NAMES = {
    "tokens_per_second": "tokens/s",
    "decode_tokens_per_second": "tokens/s, decoding",
    "speedup": "speed-up",
    "tau": "τ",
    "tau_draft": "τ draft",
    "alpha": "α",
    "acceptance": "acceptance at i",
    "acceptance_conditional": "… given i-1",
    "nodes_per_round": "nodes",
    "passes_per_round": "passes",
    "time_split": "time split",
    "identical_share": "identical",
    "divergence_rate": "divergence rate",
    "largest_margin": "widest margin",
    "distinct": "distinct tokens",
}
"""Metric -> what the report calls it."""


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
    return write_atomically(folder / "report.html", render(results, history, trees))


def render(
    results: Mapping[str, Any],
    history: list[dict[str, Any]],
    trees: Sequence[Mapping[str, Any]],
) -> str:
    """The whole page."""
    title = (results["experiment"].get("report") or {}).get("title") or results["name"] or "run"
    body = "\n".join(
        (
            _header(results, str(title)),
            _banner(results),
            comparison(results),
            work(results),
            _training(history),
            _trees(trees, results["methods"]),
            _examples(results),
            _protocol(results),
            _definitions(),
            _provenance(results),
        )
    )
    return page(str(title), body)


# --- the top ------------------------------------------------------------------------------------


def _header(results: Mapping[str, Any], title: str) -> str:
    kicker = f"{title} · {results['date'][:10]}"
    return header(kicker, headline(results), hardware_sentence(results))


def _banner(results: Mapping[str, Any]) -> str:
    found = warnings(results)
    if found:
        return banner(found)
    quality = (results["target"] or {}).get("quality")
    judged = any(s["identical_share"] is not None for s in results["methods"].values())
    said = ["Every method wrote plain decoding's tokens, on every prompt."] if judged else []
    if quality:
        said.append(f"The target passed its quality gate: {quality['verdict'].rstrip('.')}.")
    return f'<div class="fine">{escape(" ".join(said))}</div>' if said else ""


# --- figures ------------------------------------------------------------------------------------


def _training(history: list[dict[str, Any]]) -> str:
    svg = plots.training_curves(history)
    if not svg:
        return ""
    return "<h2>Training</h2>\n" + figure(svg, "Lines: training. Dots: validation.")


def _trees(trees: Sequence[Mapping[str, Any]], methods: Mapping[str, Any]) -> str:
    if not trees:
        return ""
    drawn = "".join(
        f'<figure><div class="tree">{draw_svg(tree)}</div>'
        f"<figcaption>{escape(_about(tree, methods))}</figcaption></figure>"
        for tree in trees
    )
    return (
        "<h2>A round, drawn</h2>\n<p>Every box is a token that the target read in one forward "
        "pass. The green path was accepted; the dashed box is the target’s own token after it. "
        f"Spaces show as ·, line ends as ↵, tabs as ⇥.</p>\n{drawn}"
    )


def _about(tree: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    drafted, accepted = len(tree["tokens"]) - 1, len(tree["accepted"]) - 1
    text = f"{drafted} draft tokens, {accepted} accepted"
    about = {**tree, "method": named(tree.get("method"), methods)}
    where = [f"{k} {about[k]}" for k in ("method", "prompt", "round") if about.get(k) is not None]
    return f"{text} — {', '.join(where)}" if where else text


# --- outputs ------------------------------------------------------------------------------------


def _examples(results: Mapping[str, Any]) -> str:
    name = results["headline"]
    if name is None or PLAIN not in results["methods"]:
        return ""
    pairs = list(zip(rows_of(results, PLAIN), rows_of(results, name), strict=True))
    # Answers that differ come first: they are what a reader looks for.
    pairs.sort(key=lambda pair: pair[1].identical is not False)
    shown = []
    for plain, other in pairs[:EXAMPLES]:
        verdict = {True: "identical", False: "different", None: "drawn independently"}
        answers = "".join(
            f"<div><h4>{escape(row.method)} · {len(row.tokens)} tokens · "
            f"{1000 * row.times.wall:.0f} ms · ends by {escape(row.turns[-1].finish)}</h4>"
            + "".join(f"<pre>{escape(turn.text)}</pre>" for turn in row.turns)
            + "</div>"
            for row in (plain, other)
        )
        shown.append(
            f"<details open><summary>{escape(plain.prompt)} ({escape(plain.category)}): "
            f'{verdict[other.identical]}</summary><div class="pair">{answers}</div></details>'
        )
    return "<h2>Outputs</h2>\n" + "\n".join(shown)


# --- how and with what --------------------------------------------------------------------------


def _protocol(results: Mapping[str, Any]) -> str:
    protocol = results["protocol"]
    count = len(results["methods"])
    return (
        "<h2>How it was measured</h2>\n<p>"
        f"All {count} methods ran in one process on the same prompts, one sequence at a time. "
        f"After a warm-up on {protocol['warmup']} prompt(s), {protocol['repeats']} pass(es) were "
        "timed. On every prompt all methods took their turn before the next prompt came, and who "
        "went first moved on by one each time. Each prompt counts with its median pass. Plain "
        "decoding uses the same loop, cache and kernels as the speculative methods; Hugging Face "
        "generate stands beside it for reference and is not what speed-ups are measured against. "
        "Intervals resample prompts, keeping the methods’ times on a prompt together.</p>"
    )


def _definitions() -> str:
    return "<h2>What the figures mean</h2>\n" + listing(
        {NAMES[key]: text for key, text in DEFINITIONS.items()}
    )


def _provenance(results: Mapping[str, Any]) -> str:
    seeds = ", ".join(f"{name} {seed}" for name, seed in results["seeds"].items())
    return (
        f"<h2>Provenance</h2>\n{listing(origin_of(results) | {'seeds': seeds})}\n"
        + folded("Resolved experiment", results["experiment"])
        + folded("Components", results["components"])
    )
