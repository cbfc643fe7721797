"""Throughput of plain and speculative decoding against batch size, on this machine.

    python benchmarks/batches.py [DRAFTER] [sizes=1,2,4,8,16] [clock=wall] [KEY=VALUE]...

DRAFTER is a saved drafter's folder (``runs/csgd/drafter``); ``clock=cpu`` counts the time that a
core worked for this process, for a machine that is busy; any other key is the configuration's.
The table is printed; results and a picture go to ``benchmarks/results/DATE-batches-DEVICE.json``
and ``….svg``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from falcon_bench.scripts import RESULTS, names, numbers, results_path, split, tell

DRAFTER = "runs/csgd/drafter"
TREES = ("chain,depth=6", "static,template=k2-8")
OWN = {"sizes": "1,2,4,8,16", "clock": "wall"}
SETTINGS = (
    "target.lean=true",
    "evaluation.threads=1",
    "evaluation.prompts.limit=32",
    "evaluation.max_new_tokens=64",
    "evaluation.repeats=3",
)


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    from falcon_lab.config.saved import bench_experiment
    from falcon_lab.measure.results import write_results
    from falcon_lab.studies.bench.batches import bench_batches
    from falcon_lab.studies.bench.report import format_batches, write_batches_plot

    given, others = split(arguments, OWN)
    settings, folders = OWN | given, names(others) or [DRAFTER]
    overrides = [word for word in others if "=" in word]
    experiment = bench_experiment(Path(folders[0]), TREES, [*SETTINGS, *overrides])
    results = bench_batches(
        experiment,
        numbers(settings["sizes"]),
        announce=tell,
        clock=settings["clock"],
    )
    print(format_batches(results))
    write_batches_plot(results_path(folder, "batches", results, "svg"), results)
    return write_results(results_path(folder, "batches", results), results)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
