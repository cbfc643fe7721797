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
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
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

    drafter = next((Path(word) for word in arguments if "=" not in word), Path(DRAFTER))
    settings, overrides = split([word for word in arguments if "=" in word])
    experiment = bench_experiment(drafter, TREES, [*SETTINGS, *overrides])
    results = bench_batches(
        experiment,
        [int(size) for size in settings["sizes"].split(",")],
        announce=lambda line: print(line, file=sys.stderr),
        clock=settings["clock"],
    )
    print(format_batches(results))
    device = results["hardware"]["device"].partition(":")[0]
    name = f"{datetime.now(UTC).date()}-batches-{device}"
    write_batches_plot(folder / f"{name}.svg", results)
    return write_results(folder / f"{name}.json", results)


def split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split arguments into this script's keys with values, and the configuration's overrides."""
    settings, overrides = dict(OWN), []
    for word in words:
        key, _, value = word.partition("=")
        if key in OWN:
            settings[key] = value
        else:
            overrides.append(word)
    return settings, overrides


if __name__ == "__main__":
    print(main(sys.argv[1:]))
