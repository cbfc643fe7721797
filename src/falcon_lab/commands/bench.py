"""``falcon-lab bench``: decoding measured against what users would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import click

from falcon_lab.config.schema import Experiment
from falcon_lab.measure.results import write_results
from falcon_lab.studies.bench.batches import bench_batches
from falcon_lab.studies.bench.decoding import bench_decoding
from falcon_lab.studies.bench.report import format_batches, format_bench


def bench(
    experiment: Experiment,
    methods: Collection[str],
    announce: Callable[[str], None],
    *,
    assistant: str | None = None,
    trace: Path | None = None,
    into: Path | None = None,
) -> None:
    """Measure, print the tables, and write the results ``into`` a file."""
    results = bench_decoding(
        experiment, methods, assistant=assistant, trace=trace, announce=announce
    )
    click.echo(format_bench(results))
    if into is not None:
        write_results(into, results)


def batches(
    experiment: Experiment,
    sizes: Sequence[int],
    announce: Callable[[str], None],
    *,
    into: Path | None = None,
) -> None:
    """The same for many prompts at a time: throughput at every size of a batch."""
    results = bench_batches(experiment, sizes, announce=announce)
    click.echo(format_batches(results))
    if into is not None:
        write_results(into, results)
