"""The evaluation stage of a run: prompts in, everything measured out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.compiling.choice import choose_target
from falcon_lab.config import to_plain
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.evaluation.answers import write_answers
from falcon_lab.evaluation.benchmark import PLAIN, measure
from falcon_lab.evaluation.conversation import EncodedPrompt
from falcon_lab.evaluation.engines import (
    Methods,
    build_methods,
    next_logits,
    prompts_of,
    sampling_of,
    stop_of,
)
from falcon_lab.evaluation.hf_generate import HfGenerate
from falcon_lab.evaluation.table import format_table
from falcon_lab.reporting import provenance
from falcon_lab.reporting.results import build_results, rows_of, write_results
from falcon_lab.reporting.tree_drawing import TreeRecorder
from falcon_lab.targets.loading import resolve_device

if TYPE_CHECKING:
    from falcon_lab.run import Run


def evaluate_methods(current: Run) -> dict[str, Any]:
    """Measure plain decoding and every method of the experiment; the content of results.json."""
    experiment, config = current.experiment, current.experiment.evaluation
    target = current.target.to(resolve_device(experiment.target.device))
    target = choose_target(target, experiment.decoding, current.announce)
    methods = build_methods(
        experiment, target, current.components, current.drafter_folder, current.announce
    )
    prompts = prompts_of(experiment, target)
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
        target=provenance.target_of(target, current.quality),
        hardware=provenance.hardware(
            device=str(target.device), dtype=str(target.dtype), threads=config.threads
        ),
        components=methods.provenance,
        labels=methods.labels,
        left_out=methods.left_out,
    )
    results["trees"] = drawn_trees(current, methods, prompts[0], results["headline"])
    save_answers(current, methods, results)
    write_results(current.results_path, results)
    current.announce(format_table(results))
    return results


def drawn_trees(
    current: Run, methods: Methods, prompt: EncodedPrompt, method: str | None
) -> list[dict[str, Any]]:
    """The tree with the longest accepted path that the fastest method grew on one prompt."""
    if method is None:
        return []
    experiment, target = current.experiment, current.target
    recorder = TreeRecorder(target.tokenizer.decode, prompt=prompt.id, method=method)
    methods.engines[method].generate(
        prompt.tokens([]),
        max_new_tokens=experiment.evaluation.max_new_tokens,
        sampling=sampling_of(experiment),
        generator=torch.Generator(target.device).manual_seed(experiment.evaluation.seed),
        stop=stop_of(experiment, target),
        on_round=recorder,
    )
    best = recorder.best()
    return [best] if best else []


def save_answers(current: Run, methods: Methods, results: dict[str, Any]) -> None:
    """Every method's answers in Spec-Bench's format."""
    folder: Path = current.folder / "answers"
    folder.mkdir(exist_ok=True)
    for name in (PLAIN, *methods.engines):
        write_answers(folder / f"{name}.jsonl", name, rows_of(results, name))
