"""Measure decoding, from an experiment to its results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.config.schema import Experiment, dtype_name
from falcon_lab.measure.engines import Setup
from falcon_lab.measure.records import Record, Times, total_times
from falcon_lab.plugins.discovery import load_components
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.studies.bench.loops import benchmark
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
        experiment: target, prompts, lengths; ``evaluation.methods`` are those with a drafter.
        methods: keys of ``METHODS``.
        assistant: a model for assisted generation, by hub id or folder.
        trace: where to write a Chrome trace of our loops.
        announce: is called with one line for the user at a time.

    Returns:
        What ``results.json`` holds, and ``bench``: ``machine``, ``cost`` (of a target pass) and,
        under ``methods``, each method's ``split``, ``memory`` and ``floor``.

    Raises:
        FalconLabError: for whatever the user can mend.
    """
    check = partial(check_bench, assistant=assistant)
    setup = Setup.load(experiment, load_components(), announce, check)
    helper = load_assistant(setup, assistant)
    # The longest first: it warms up, and what is allocated for it is enough for the others.
    prompts = sorted(setup.prompts(), key=lambda p: -len(p.tokens([])))
    answer = partial(setup.answer, prompt=prompts[0])
    found = benchmark(setup, methods, helper, attempt=answer)
    cost, device = PassCost.of(setup.target), setup.target.device
    with torch_threads(experiment.evaluation.threads):
        header = setup.header()
        announce("measuring what this machine copies and multiplies")
        machine = measure_machine(device, setup.target.dtype, cost.weight_bytes if cost else 0)
        measurement = setup.measure(found.engines, prompts)
        peaks = {n: peak_of(partial(answer, e), device) for n, e in found.engines.items()}
        if trace is not None:
            announce(f"tracing {TOKENS} tokens of each of our loops into {trace}")
            write_trace(trace, found.ours, partial(answer, tokens=TOKENS))
    results = setup.results(measurement, found.methods, header)
    speed = {n: results["methods"][n]["tokens_per_second"] for n in found.methods.engines}
    results["headline"] = max(speed, key=lambda name: speed[name], default=None)
    results["bench"] = {
        "machine": asdict(machine),
        "cost": asdict(cost) if cost else None,
        "methods": {
            name: {
                "split": split(records),
                "memory": asdict(peak) if (peak := peaks[name]) else None,
                "floor": under(records, cost, machine),
            }
            for name, records in measurement.records.items()
        },
    }
    return results


def check_bench(setup: Setup, assistant: str | None) -> None:
    """See that everything can be measured; the assistant too where the target is yet to be trained.

    Raises:
        FalconLabError: as ``Setup.check``, or the assistant cannot be loaded.
    """
    setup.check()
    if setup.stands_in:
        load_assistant(setup, assistant)


def load_assistant(setup: Setup, name: str | None) -> Target | None:
    """Load the assistant in the target's own precision, on its device."""
    if name is None:
        return None
    target = setup.target
    config = replace(
        setup.experiment.target,
        name=name,
        revision=None,
        pretraining=None,
        dtype=dtype_name(target.dtype),
        device=str(target.device),
    )
    found: Target = ensure_target(config, setup.announce)
    return found


def split(records: list[Record]) -> dict[str, float] | None:
    """Return the share of decoding time by part of the loop, in %; None for a black box."""
    times = total_times(records)
    if not times.decode:
        return None
    whole = sum(_part(times, name) for name in SPLIT)
    return {name: 100 * _part(times, name) / whole for name in SPLIT}


def _part(times: Times, name: str) -> float:
    return float(getattr(times, name) or 0.0)


def under(records: list[Record], cost: PassCost | None, machine: Machine) -> dict[str, Any] | None:
    """Return the floor under a method's passes as plain values."""
    floor = floor_of(records, cost, machine) if cost else None
    return asdict(floor) if floor else None
