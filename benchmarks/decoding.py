"""Decoding on this machine, as the main job measures it, against Hugging Face's ways.

    python benchmarks/decoding.py [DRAFTER] [TREE.yaml]... [KEY=VALUE]...

DRAFTER is a saved drafter's folder (``runs/csgd/drafter``); a tree that ``falcon-lab tune`` wrote
is measured beside the others. The tables are printed; the results, without the answers' texts and
tokens, go to ``benchmarks/results/DATE-decoding-DEVICE.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_bench.scripts import RESULTS, names, results_path, tell

DRAFTER = "runs/csgd/drafter"
TREES = ("chain,depth=8", "static,template=k2-10-d8", "dynamic,nodes=10,beam=2,depth=10")
SETTINGS = (
    "target.lean=true",
    "controller.name=confidence",
    "controller.threshold=0.2",
    "evaluation.threads=1",
    "evaluation.prompts.limit=12",
    "evaluation.max_new_tokens=128",
    "evaluation.methods.lookup.optional=true",
    "evaluation.methods.lookup.drafter.name=lookup",
    "evaluation.methods.lookup.tree.name=chain",
    "evaluation.methods.lookup.tree.depth=10",
    "evaluation.methods.lookup.controller.name=fixed",
)


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    from falcon_lab.config.saved import bench_experiment
    from falcon_lab.measure.results import write_results
    from falcon_lab.studies.bench import METHODS
    from falcon_lab.studies.bench.decoding import bench_decoding
    from falcon_lab.studies.bench.report import format_bench

    overrides = [word for word in arguments if "=" in word]
    trees = [word for word in names(arguments) if word.endswith(".yaml")]
    folders = [word for word in names(arguments) if word not in trees] or [DRAFTER]
    experiment = bench_experiment(Path(folders[0]), [*TREES, *trees], [*SETTINGS, *overrides])
    results = bench_decoding(experiment, list(METHODS), announce=tell)
    print(format_bench(results))
    return write_results(results_path(folder, "decoding", results), without_answers(results))


def without_answers(results: dict[str, Any]) -> dict[str, Any]:
    """The results without what was written: figures alone are kept in the repository."""
    kept = [
        {**row, "turns": [{k: v for k, v in turn.items() if k not in ANSWER} for turn in turns]}
        for row in results["rows"]
        for turns in [row["turns"]]
    ]
    return {**results, "rows": kept}


ANSWER = ("tokens", "text")

if __name__ == "__main__":
    print(main(sys.argv[1:]))
