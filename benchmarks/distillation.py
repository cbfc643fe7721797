"""Training with the main job's settings, against the same step written straightforwardly.

    python benchmarks/distillation.py [speed] [memory] [arms] [steps=N] [KEY=VALUE]...

``speed`` and ``memory`` by default. The tables are printed; the results go to
``benchmarks/results/DATE-distillation-PART-DEVICE.json``. ``memory`` takes 20 GiB and a quarter of
an hour: its shapes are large for a CPU. ``arms`` measures what precision and stored features are
worth, best on a target with a real vocabulary:

    python benchmarks/distillation.py arms target.name=smollm2 data.length=384
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from falcon_bench.scripts import RESULTS, names, results_path, split, tell

HERE = Path(__file__).parent
EXPERIMENT = HERE.parent / "experiments" / "csgd.yaml"
STEPS = 40
SETTINGS = ("data.documents=600", "data.regenerate=0.0", "data.validation=0")
"""What the batches say does not matter here."""

LARGE = {"vocabulary": 131_072, "hidden": 4096}
NARROW = {"vocabulary": 131_072, "hidden": 1024}
SHAPES: tuple[dict[str, Any], ...] = (
    {"whole": True, **LARGE, "sequences": 1, "length": 512},
    {"whole": True, **LARGE, "sequences": 1, "length": 1024},
    {"whole": False, **LARGE, "sequences": 1, "length": 512},
    {"whole": False, **LARGE, "sequences": 1, "length": 1024},
    {"whole": False, **LARGE, "sequences": 4, "length": 2048},
    {"whole": True, **NARROW, "sequences": 4, "length": 512},
    {"whole": False, **NARROW, "sequences": 4, "length": 512},
)
"""The straightforward way does not fit into 24 GiB at the fifth."""


def main(
    arguments: Sequence[str],
    folder: Path = RESULTS,
    shapes: Sequence[dict[str, Any]] = SHAPES,
    steps: int = STEPS,
) -> list[Path]:
    """Measure, print, and write the results into ``folder``; their files."""
    from falcon_lab.measure.results import write_results

    own, words = split(arguments, ("steps",))
    steps = int(own.get("steps", steps))
    parts = names(words) or ["speed", "memory"]
    overrides = [*SETTINGS, *(word for word in words if "=" in word)]
    measure = {
        "speed": lambda: speed(overrides, steps),
        "memory": lambda: memory(shapes),
        "arms": lambda: arms(overrides, steps),
    }
    written = []
    for part in parts:
        results = measure[part]()
        path = results_path(folder, f"distillation-{part}", results)
        written.append(write_results(path, results))
    return written


def speed(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Ours and the ladder below it, in turns."""
    from falcon_bench.distillation_cost import bench_distillation, format_speed
    from falcon_lab.config.load import load_experiment

    experiment = load_experiment(EXPERIMENT, overrides)
    results = bench_distillation(experiment, steps=steps, announce=tell)
    print(format_speed(results))
    return results


def arms(overrides: Sequence[str], steps: int) -> dict[str, Any]:
    """Ways of computing a step, in turns."""
    from falcon_bench.distillation_arms import bench_arms, format_arms
    from falcon_lab.config.load import load_experiment

    results = bench_arms(load_experiment(EXPERIMENT, overrides), steps=steps, announce=tell)
    print(format_arms(results))
    return results


def memory(shapes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Measure each shape in a process of its own."""
    import torch

    from falcon_bench.distillation_cost import Shape, format_memory, measure_apart
    from falcon_lab.measure import provenance

    header, found = provenance.header(dtype="torch.float32", folder=HERE), []
    for shape in shapes:
        tell(f"measuring {shape}")
        found.append(measure_apart(Shape(**shape), threads=torch.get_num_threads()))
    print(format_memory(found))
    return {
        "schema": 1,
        "name": "distillation-memory",
        **header,
        "measured": found,
    }


if __name__ == "__main__":
    for path in main(sys.argv[1:]):
        print(path)
