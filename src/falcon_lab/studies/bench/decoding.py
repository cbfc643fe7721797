"""One benchmark of decoding, from an experiment to its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from falcon_lab.config.load import to_plain
from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.compiling import choose_target
from falcon_lab.measure import provenance
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import next_logits, prompts_of, sampling_of, stop_of
from falcon_lab.measure.measurement import Measurement, measure
from falcon_lab.measure.records import Record, Times
from falcon_lab.measure.results import build_results
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.studies.bench.loops import Contest, contest
from falcon_lab.studies.bench.machine import Machine, PassCost, floor_of, measure_machine
from falcon_lab.studies.bench.memory import peak_of
from falcon_lab.studies.bench.tracing import TOKENS, write_trace
from falcon_lab.timing import torch_threads

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

SPLIT = ("draft", "verify", "accept", "commit", "overhead")


def bench_decoding(
    experiment: Experiment,
    methods: Collection[str],
    *,
    assistant: str | None = None,
    trace: Path | None = None,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Let every method answer every prompt, in turns; the results with what the machine can do.

    Args:
        experiment: target, prompts, lengths; ``evaluation.methods`` are the speculative rows.
        methods: keys of ``METHODS``.
        assistant: a model for assisted generation, by hub id or folder.
        trace: where to write a Chrome trace of our loops.
        announce: takes one line for the user at a time.

    Returns:
        What ``results.json`` holds, and ``bench``: ``machine``, ``cost`` (of a target pass) and,
        under ``methods``, each row's ``split``, ``memory`` and ``floor``.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    target = ensure_target(experiment.target, announce)
    target = choose_target(target, experiment.decoding, announce)
    helper = load_assistant(experiment, target, assistant, announce)
    # The longest first: it warms up, and what is allocated for it is enough for the others.
    prompts = sorted(prompts_of(experiment, target), key=lambda p: -len(p.tokens([])))
    answer = answering(experiment, target, prompts[0])
    found = contest(experiment, target, load_components(), methods, helper, attempt=answer)
    cost = PassCost.of(target)
    with torch_threads(experiment.evaluation.threads):
        header = provenance.header(target)
        announce("measuring what this machine copies and multiplies")
        machine = measure_machine(target.device, target.dtype, cost.weight_bytes if cost else 0)
        measurement = measure(
            found.engines,
            prompts,
            experiment.evaluation,
            stop=stop_of(experiment, target),
            logits=next_logits(target),
        )
        peaks = {n: peak_of(partial(answer, e), target.device) for n, e in found.engines.items()}
        if trace is not None:
            announce(f"tracing {TOKENS} tokens of each of our loops into {trace}")
            ours = {name: found.engines[name] for name in found.ours}
            write_trace(trace, ours, partial(answer, tokens=TOKENS))
    results = compared(experiment, target, found, measurement, header)
    results["bench"] = {
        "machine": asdict(machine),
        "cost": asdict(cost) if cost else None,
        "methods": {
            name: {
                "split": split(rows),
                "memory": asdict(peak) if (peak := peaks[name]) else None,
                "floor": under(rows, cost, machine),
            }
            for name, rows in measurement.records.items()
        },
    }
    return results


def load_assistant(
    experiment: Experiment, target: Target, name: str | None, announce: Callable[[str], None]
) -> Target | None:
    """The assistant in the target's own precision, on its device."""
    if name is None:
        return None
    config = replace(
        experiment.target,
        name=name,
        revision=None,
        pretraining=None,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
    )
    found: Target = ensure_target(config, announce)
    return found


def answering(
    experiment: Experiment, target: Target, prompt: EncodedPrompt
) -> Callable[..., object]:
    """Lets an engine answer the first turn of a prompt once, outside the measurement."""

    def answer(engine: Any, tokens: int | None = None) -> object:
        limit = experiment.evaluation.max_new_tokens
        return engine.generate(
            prompt.tokens([]),
            max_new_tokens=limit if tokens is None else min(limit, tokens),
            sampling=sampling_of(experiment),
            generator=torch.Generator(target.device).manual_seed(experiment.evaluation.seed),
            stop=stop_of(experiment, target),
        )

    return answer


def compared(
    experiment: Experiment,
    target: Target,
    found: Contest,
    measurement: Measurement,
    header: Mapping[str, Any],
) -> dict[str, Any]:
    """The measurement as ``results.json`` tells it; its headline is the fastest drafting row."""
    results = build_results(
        measurement,
        experiment=to_plain(experiment),
        target=provenance.target_of(target),
        header=header,
        components=found.provenance,
        labels=found.labels,
        left_out=found.left_out,
    )
    speed = {name: results["methods"][name]["tokens_per_second"] for name in found.speculative}
    results["headline"] = max(speed, key=lambda name: speed[name], default=None)
    return results


def split(rows: list[Record]) -> dict[str, float] | None:
    """Share of decoding time by part of the loop, in %; None for what cannot be looked into."""
    first, *rest = (row.times for row in rows)
    times = sum(rest, first)
    if not times.decode:
        return None
    whole = sum(_part(times, name) for name in SPLIT)
    return {name: 100 * _part(times, name) / whole for name in SPLIT}


def _part(times: Times, name: str) -> float:
    return float(getattr(times, name) or 0.0)


def under(rows: list[Record], cost: PassCost | None, machine: Machine) -> dict[str, Any] | None:
    """The floor under a method's passes as plain values."""
    floor = floor_of(rows, cost, machine) if cost else None
    return asdict(floor) if floor else None
