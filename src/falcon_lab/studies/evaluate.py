"""The evaluation stage of a run: prompts in, everything measured out."""

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
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import (
    build_methods,
    next_logits,
    prompts_of,
    sampling_of,
    stop_of,
)
from falcon_lab.measure.hf_generate import HfGenerate
from falcon_lab.measure.measurement import PLAIN, measure
from falcon_lab.measure.records import write_answers
from falcon_lab.measure.results import build_results, records_of, write_results
from falcon_lab.model.loading import resolve_device
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.report.methods import format_table
from falcon_lab.report.tree_drawing import TreeRecorder

RESULTS = "results.json"
"""What an evaluation leaves in the run's folder."""


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
        write_answers(folder / f"{name}.jsonl", name, records_of(results, name))
