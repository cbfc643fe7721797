"""The evaluation stage of a run: prompts in, everything measured out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from falcon_lab.config.load import to_plain
from falcon_lab.config.saved import ANSWERS, REPORT, RESULTS
from falcon_lab.config.schema import PLAIN, Experiment
from falcon_lab.decoding.assembling import KINDS
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.drafters.saved import CARD
from falcon_lab.files import check_place
from falcon_lab.interfaces import Drafter
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import Methods, Setup
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.journal import FOLDER as ROWS
from falcon_lab.measure.records import write_answers
from falcon_lab.measure.results import records_of, replace_results, write_results
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.report.methods import format_table
from falcon_lab.report.tree_drawing import TreeRecorder


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
        announce: is called with one line for the user at a time.

    Returns:
        The content of ``results.json``.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    setup = Setup.of(experiment, target, components, announce)
    methods = setup.methods(trained)
    check_place(folder / ROWS, folder=True)
    for name in (PLAIN, *methods.all):
        check_place(folder / ANSWERS / f"{name}.jsonl", folder=False)
    prompts, header = setup.prompts(), setup.header()
    journal = setup.journal(folder, "evaluate", prompts, deciding(experiment, methods))
    measurement = setup.measure(
        {PLAIN: setup.plain(), **methods.all},
        prompts,
        hf=HfGenerate(setup.target) if experiment.evaluation.hf_generate else None,
        journal=journal,
    )
    results = setup.results(measurement, methods, header, quality=quality)
    results["trees"] = []
    made_of = [folder / REPORT, folder / ANSWERS]
    if "report" in experiment.stages:
        made_of.append(trained / CARD)
    # First of all: nothing that follows can lose what was measured.
    replace_results(folder / RESULTS, results, made_of, announce=announce)
    journal.remove()  # the same command then measures anew
    results["trees"] = drawn_trees(setup, methods.engines, prompts[0], results["headline"])
    write_results(folder / RESULTS, results)
    save_answers(folder / ANSWERS, [PLAIN, *methods.all], results)
    announce(format_table(results))
    return results


def deciding(experiment: Experiment, methods: Methods) -> dict[str, Any]:
    """Return what decides how the methods answer, beside the target and the evaluation's keys."""
    plain = to_plain(experiment)
    return {
        "parts": {kind: plain[kind] for kind in KINDS},
        "drafter": plain["drafter"],
        "components": methods.provenance,
        "left_out": sorted(methods.left_out),
        "weights": {name: digest_of(engine.drafter) for name, engine in methods.engines.items()},
    }


def digest_of(drafter: Drafter) -> str:
    """Identify the weights of a drafter, and of those that it is made of."""
    found = hashlib.sha256()
    for one in (drafter, *drafter.drafters):
        for name, weight in one.state_dict().items() if isinstance(one, nn.Module) else ():
            found.update(name.encode())
            found.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def drawn_trees(
    setup: Setup,
    engines: Mapping[str, SpeculativeEngine],
    prompt: EncodedPrompt,
    method: str | None,
) -> list[dict[str, Any]]:
    """Return the tree with the longest accepted path that the fastest method grew on one prompt."""
    if method is None or method not in engines:  # there is none, or it grows no trees
        return []
    recorder = TreeRecorder(setup.target.tokenizer.decode, prompt=prompt.id, method=method)
    setup.answer(engines[method], prompt, on_round=recorder)
    best = recorder.best()
    return [best] if best else []


def save_answers(folder: Path, methods: Sequence[str], results: dict[str, Any]) -> None:
    """Write every method's answers in Spec-Bench's format."""
    for name in methods:
        write_answers(folder / f"{name}.jsonl", name, records_of(results, name))
