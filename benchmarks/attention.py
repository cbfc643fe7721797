"""sdpa with the whole mask against a maskless prefix merged with its tree, on this machine.

    python benchmarks/attention.py [KEY=VALUE]...

Keys, with what they are on a CPU: ``shapes=4x4x32,8x2x64`` (query heads, key heads, numbers of a
head), ``contexts=512,4096,16384,32768``, ``rows=1,16,64``, ``dtype=float32``, ``threads=1``,
``seconds=0.5`` for each figure. On a GPU: ``shapes=32x32x128,32x8x128`` and ``dtype=bfloat16``. The
table is printed; the results go to ``benchmarks/results/DATE-attention-DEVICE.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from falcon_bench.scripts import RESULTS, numbers, pairs, results_path, tell

DEFAULTS = {
    "cpu": {"shapes": "4x4x32,8x2x64", "dtype": "float32", "threads": "1"},
    "cuda": {"shapes": "32x32x128,32x8x128", "dtype": "bfloat16", "threads": "1"},
}
ALWAYS = {"contexts": "512,4096,16384,32768", "rows": "1,16,64", "seconds": "0.5"}


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path:
    """Measure, print, and write the results into ``folder``; their file."""
    import torch

    from falcon_bench.attention_cost import bench_attention, format_attention
    from falcon_lab.measure.results import write_results
    from falcon_lab.model.attention.choosing import AttentionShape
    from falcon_lab.timing import torch_threads

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = ALWAYS | DEFAULTS[device.type] | pairs(arguments)
    if unknown := set(settings) - set(ALWAYS) - set(DEFAULTS[device.type]):
        raise SystemExit(f"no key {', '.join(sorted(unknown))}; see the top of {__file__}")
    dtype = getattr(torch, settings["dtype"])
    shapes = {}
    for name in settings["shapes"].split(","):
        heads, groups, size = map(int, name.split("x"))
        shapes[name] = AttentionShape(heads, groups, size, device, dtype)
    with torch_threads(int(settings["threads"])):
        results = bench_attention(
            shapes,
            contexts=numbers(settings["contexts"]),
            rows=numbers(settings["rows"]),
            seconds=float(settings["seconds"]),
            announce=tell,
        )
    print(format_attention(results))
    return write_results(results_path(folder, "attention", results), results)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
