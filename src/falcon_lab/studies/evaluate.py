"""The comparison as aligned plain text: speed first, then where it comes from.

Works on the ``methods`` of ``results.json``, so that a run and a file print the same table.

The evaluation stage of a run: prompts in, everything measured out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.compiling import choose_target
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.measure import provenance
from falcon_lab.measure.benchmark import PLAIN, measure
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import (
    build_methods,
    next_logits,
    prompts_of,
    sampling_of,
    stop_of,
)
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.records import write_answers
from falcon_lab.measure.results import build_results, rows_of, write_results
from falcon_lab.model.loading import resolve_device
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.report.tree_drawing import TreeRecorder

RESULTS = "results.json"
"""What an evaluation leaves in the run's folder."""

NOTHING = "—"
SPEED = ("method", "tok/s", "speed-up [95 %]", "τ", "τ draft", "α %", "identical")
WORK = (
    "method",
    "draft",
    "verify",
    "commit",
    "other %",
    "nodes",
    "passes",
    "accepted at 1, 2, … %",
)


def format_table(results: Mapping[str, Any]) -> str:
    """The final table of a run.

    Args:
        results: with ``methods`` (method -> summary as a dict), and, where there are any,
            ``left_out`` and ``target``.
    """
    methods: Mapping[str, Mapping[str, Any]] = results["methods"]
    speed = align([SPEED, *(_speed(name, summary) for name, summary in methods.items())])
    drafting = [(n, s) for n, s in methods.items() if s["time_split"] is not None]
    blocks = [speed]
    if drafting:
        blocks.append(align([WORK, *(_work(name, summary) for name, summary in drafting)]))
    blocks.append("\n".join(_notes(results)))
    return "\n\n".join(blocks)


def name_of(name: str, summary: Mapping[str, Any]) -> str:
    """A lossy rule says so wherever its method is named."""
    return name if summary["lossless"] else f"{name} (lossy)"


def named(method: str | None, methods: Mapping[str, Any]) -> str | None:
    """``name_of`` one of several methods; what is none of them stays as it is."""
    return method if method is None or method not in methods else name_of(method, methods[method])


def _speed(name: str, s: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name_of(name, s),
        number(s["tokens_per_second"], 1),
        speedup_text(s["speedup"]),
        number(s["tau"], 2),
        number(s["tau_draft"], 2),
        NOTHING if s["alpha"] is None else number(100 * s["alpha"], 1),
        identical_text(s),
    )


def _work(name: str, s: Mapping[str, Any]) -> tuple[str, ...]:
    split = s["time_split"]
    return (
        name_of(name, s),
        *(number(split[part], 0) for part in ("draft", "verify", "accept_commit", "overhead")),
        number(s["nodes_per_round"], 1),
        number(s["passes_per_round"], 1),
        " ".join(percent(share) for share in s["acceptance"]) or NOTHING,
    )


def number(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as whole percents, or a dash."""
    return NOTHING if value is None else f"{100 * value:.0f}"


def speedup_text(speedup: Mapping[str, Any] | None) -> str:
    """``2.31× [2.20, 2.43]``; no interval from one prompt."""
    if speedup is None:
        return NOTHING
    text = f"{speedup['ratio']:.2f}×"
    if speedup["low"] is None:
        return text
    return f"{text} [{speedup['low']:.2f}, {speedup['high']:.2f}]"


def identical_text(s: Mapping[str, Any]) -> str:
    """``yes``, or on how many prompts; a dash for plain decoding and for sampling."""
    share = s["identical_share"]
    if share is None:
        return NOTHING
    if share == 1:
        return "yes"
    return f"no: {round(share * s['prompts'])} of {s['prompts']}"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if place in (0, last) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)


def _notes(results: Mapping[str, Any]) -> list[str]:
    notes = [
        "Speed-up: wall time per token against plain decoding in the same loop, prefill included. "
        "τ counts the",
        "target's own token, τ draft does not; α = accepted/(accepted + rounds). Times in % of "
        "decoding; commit",
        "holds acceptance; nodes (draft tokens verified) and passes (of the drafter) per round.",
    ]
    notes += [f"! {line}" for line in warnings(results)]
    notes += [f"Left out: {n} ({why})" for n, why in (results.get("left_out") or {}).items()]
    return notes


def quality_warnings(results: Mapping[str, Any]) -> list[str]:
    """That the target is not what one would speed up, if so."""
    quality = (results.get("target") or {}).get("quality")
    if not quality or quality["passed"]:
        return []
    return [f"The target did not pass its quality gate: {quality['verdict'].rstrip('.')}."]


def lossy_warning(name: str) -> str:
    """What a lossy rule means."""
    return f"{name} uses a lossy rule: its output does not follow the target's."


def warnings(results: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures, a sentence each."""
    found = quality_warnings(results)
    for name, s in results["methods"].items():
        if not s["lossless"]:
            found.append(lossy_warning(name))
        share = s["identical_share"]
        if share is not None and share < 1:
            margin = s["largest_margin"]
            gap = "" if margin is None else f"; widest logit margin there {margin:.2g}"
            found.append(
                f"{name} differs from plain decoding on {round((1 - share) * s['prompts'])} of "
                f"{s['prompts']} prompts ({1000 * s['divergence_rate']:.2g} first differences per "
                f"1000 tokens{gap})."
            )
        if not s["repeats_agree"]:
            found.append(f"{name} did not write the same tokens in every repeat.")
    return found


def evaluate_methods(
    experiment: Experiment,
    target: Target,
    components: Components,
    folder: Path,
    *,
    trained: Path,
    quality: Mapping[str, Any] | None = None,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Measure plain decoding and every method of the experiment.

    Args:
        experiment: what is measured, and how.
        target: verifies.
        components: the registry.
        folder: of the run; gets ``results.json`` and every method's answers.
        trained: folder of the run's own drafter.
        quality: what is known of a target that was trained here.
        announce: takes one line for the user at a time.

    Returns:
        The content of ``results.json``.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    config = experiment.evaluation
    target = target.to(resolve_device(experiment.target.device))
    target = choose_target(target, experiment.decoding, announce)
    methods = build_methods(experiment, target, components, trained, announce)
    prompts = prompts_of(experiment, target)
    header = provenance.header(target, threads=config.threads)
    measurement = measure(
        {PLAIN: PlainEngine(target, decoding=experiment.decoding), **methods.engines},
        prompts,
        config,
        stop=stop_of(experiment, target),
        hf=HfGenerate(target) if config.hf_generate else None,
        logits=next_logits(target),
    )
    results = build_results(
        measurement,
        experiment=to_plain(experiment),
        target=provenance.target_of(target, quality),
        header=header,
        components=methods.provenance,
        labels=methods.labels,
        left_out=methods.left_out,
    )
    fastest = results["headline"]
    results["trees"] = drawn_trees(experiment, methods.engines, prompts[0], fastest)
    save_answers(folder / "answers", [PLAIN, *methods.engines], results)
    write_results(folder / RESULTS, results)
    announce(format_table(results))
    return results


def drawn_trees(
    experiment: Experiment,
    engines: Mapping[str, SpeculativeEngine],
    prompt: EncodedPrompt,
    method: str | None,
) -> list[dict[str, Any]]:
    """Return the tree with the longest accepted path that the fastest method grew on one prompt."""
    if method is None:
        return []
    target = engines[method].target
    recorder = TreeRecorder(target.tokenizer.decode, prompt=prompt.id, method=method)
    engines[method].generate(
        prompt.tokens([]),
        max_new_tokens=experiment.evaluation.max_new_tokens,
        sampling=sampling_of(experiment),
        generator=torch.Generator(target.device).manual_seed(experiment.evaluation.seed),
        stop=stop_of(experiment, target),
        on_round=recorder,
    )
    best = recorder.best()
    return [best] if best else []


def save_answers(folder: Path, methods: Sequence[str], results: dict[str, Any]) -> None:
    """Write every method's answers in Spec-Bench's format."""
    folder.mkdir(exist_ok=True)
    for name in methods:
        write_answers(folder / f"{name}.jsonl", name, rows_of(results, name))
