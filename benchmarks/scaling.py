"""Growth of a pass's cost with nodes, context, batch and vocabulary, on this machine.

    python benchmarks/scaling.py [KEY=VALUE]...

Keys: ``turns=40`` for each pass, ``threads=1``, ``nodes=1,2,4,…,64``, ``contexts=64,…,8192``,
``batches=1,2,4,8,16``, ``vocabularies=512,…,131072``, ``draft_vocabularies=4096,…`` (none unless
given), and ``tree=8`` and ``context=256`` where something else grows; any other key is the
configuration's, as ``target.name=…``. The target is the main job's, through the lean forward, and
so is the drafter, with random weights. The table is printed; results and a picture go to
``benchmarks/results/DATE-scaling-DEVICE.json`` and ``….svg``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_bench.scripts import RESULTS, numbers, results_path, split, tell

HERE = Path(__file__).parent
MAIN_JOB = HERE.parent / "experiments" / "csgd.yaml"
NUMBERS = ("turns", "threads", "tree", "context")
LISTS = ("nodes", "contexts", "batches", "vocabularies", "draft_vocabularies")


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    from falcon_bench.scaling_cost import bench_scaling, format_scaling, write_plot
    from falcon_lab.config.load import load_experiment
    from falcon_lab.measure.pass_costs import Sizes
    from falcon_lab.measure.results import write_results
    from falcon_lab.plugins.discovery import load_components
    from falcon_lab.pretraining.target import ensure_target
    from falcon_lab.timing import torch_threads

    given, overrides = split(arguments, (*NUMBERS, *LISTS))
    settings: dict[str, Any] = {
        key: numbers(text) if key in LISTS else int(text) for key, text in given.items()
    }
    turns, threads = settings.pop("turns", 40), settings.pop("threads", 1)
    experiment = load_experiment(MAIN_JOB, ["target.lean=true", *overrides])
    target = ensure_target(experiment.target, tell)
    with torch_threads(threads):
        results = bench_scaling(
            target,
            load_components(),
            experiment.drafter,
            Sizes(**settings),
            turns=turns,
            announce=tell,
        )
    print(format_scaling(results))
    write_plot(results_path(folder, "scaling", results, "svg"), results)
    return write_results(results_path(folder, "scaling", results), results)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
