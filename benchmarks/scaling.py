"""Growth of a pass's cost with nodes, context, batch and vocabulary, on this machine.

    python benchmarks/scaling.py [KEY=VALUE]...

Keys: ``turns=40`` for each pass, ``threads=1``, ``nodes=1,2,4,…,64``, ``contexts=64,…,8192``,
``batches=1,2,4,8,16``, ``vocabularies=512,…,131072``, and ``tree=8`` and ``context=256`` where
something else grows; any other key is the configuration's, as ``target.name=…``. The target is the
main job's, through the lean forward, and so is the drafter, with random weights. The table is
printed; results and a picture go to ``benchmarks/results/DATE-scaling-DEVICE.json`` and ``….svg``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
MAIN_JOB = HERE.parent / "experiments" / "csgd.yaml"
NUMBERS = ("turns", "threads", "tree", "context")
LISTS = ("nodes", "contexts", "batches", "vocabularies")


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    from falcon_bench.scaling_cost import bench_scaling, format_scaling, write_plot
    from falcon_lab.config.load import load_experiment
    from falcon_lab.measure.pass_costs import Sizes
    from falcon_lab.measure.results import write_results
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab.timing import torch_threads

    settings, overrides = split(arguments)
    turns, threads = settings.pop("turns", 40), settings.pop("threads", 1)
    experiment = load_experiment(MAIN_JOB, ["target.lean=true", *overrides])

    def announce(line: str) -> None:
        print(line, file=sys.stderr)

    target = ensure_target(experiment.target, announce)
    with torch_threads(threads):
        results = bench_scaling(
            target,
            load_components(),
            experiment.drafter,
            Sizes(**settings),
            turns=turns,
            announce=announce,
        )
    print(format_scaling(results))
    name = f"{datetime.now(UTC).date()}-scaling-{target.device.type}"
    path = write_results(folder / f"{name}.json", results)
    write_plot(folder / f"{name}.svg", results)
    return path


def split(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split arguments into this script's keys with values, and the configuration's overrides."""
    settings: dict[str, Any] = {}
    overrides = []
    for word in arguments:
        key, _, value = word.partition("=")
        if key in NUMBERS:
            settings[key] = int(value)
        elif key in LISTS:
            settings[key] = [int(each) for each in value.split(",")]
        else:
            overrides.append(word)
    return settings, overrides


if __name__ == "__main__":
    print(main(sys.argv[1:]))
