"""Check what a GPU must show, in three parts that can be called one by one.

    python benchmarks/gpu.py shape [toy] [contexts=512,8192] [KEY=VALUE]...
    python benchmarks/gpu.py real [toy] [work=runs/gpu] [until=target] [KEY=VALUE]...
    python benchmarks/gpu.py attention [KEY=VALUE]...

``shape``: Llama 2 7B's shape with random weights. Our plain loop, eager and as CUDA graphs, against
the machine's floor and Hugging Face's modes; trees against one token; the speculative loop with an
*assumed* acceptance. ``real``: a target trained from scratch on this machine's Python sources, its
drafter, and both on ``prompts=FILE``; what ``work`` has already is not made again, and ``until``
stops after ``target`` or ``drafter``. ``attention`` is ``benchmarks/attention.py``. ``toy`` is the
same in small, for a CPU.

Keys are those of ``Plan`` in ``falcon_bench/gpu_shape.py`` and ``gpu_training.py`` (``tokens``,
``nodes``, ``template``, ``accepted``, ``attention``, ``static``; ``minutes``, ``megabytes``,
``batch_size``, ``lr``, ``limit``, ``new_tokens``, ``trees``), and those of the model's shape
(``layers``, ``hidden``, ``intermediate``, ``heads``). Values are JSON, or lists of words between
commas; ``trees`` between semicolons. Tables are printed; results go to
``benchmarks/results/DATE-gpu-CHECK-DEVICE.json`` (``CHECK-512`` with ``contexts=512``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from falcon_bench.scripts import RESULTS, pairs, results_path, tell

HERE = Path(__file__).parent
CHECKS = ("shape", "real", "attention")
FLAGS = ("toy",)


def main(arguments: Sequence[str], folder: Path = RESULTS) -> Path | None:
    """Run one check, and return the file with its results, if there are any yet."""
    check, *words = arguments or ["nothing"]
    if check not in CHECKS:
        raise SystemExit(f"which check? one of {', '.join(CHECKS)}; see the top of {__file__}")
    return {"shape": shape, "real": real, "attention": attention}[check](words, folder)


def shape(words: Sequence[str], folder: Path) -> Path:
    """Run the first check: measure a target of a shape with random weights."""
    from falcon_bench.gpu_shape import TOY, Plan, bench_shape, format_shape, verdicts
    from falcon_lab.model.loading import resolve_device

    quietly()
    plan = with_values(TOY if "toy" in words else Plan(), pairs(words, flags=FLAGS))
    results = bench_shape(plan, resolve_device("auto"), tell)
    results["verdicts"] = verdicts(results)
    print(format_shape(results), *results["verdicts"], sep="\n")
    return write(called("shape", words, "contexts"), results, results, folder)


def real(words: Sequence[str], folder: Path) -> Path | None:
    """Run the second check: train and measure real models."""
    from falcon_bench.gpu_real import bench_real
    from falcon_bench.gpu_training import TOY, Plan
    from falcon_lab.studies.bench.report import format_bench

    quietly()
    values = pairs(words, flags=FLAGS)
    work, until = Path(values.pop("work", "runs/gpu")), values.pop("until", "measure")
    if until not in ("target", "drafter", "measure"):
        raise SystemExit(f"until={until}: say target, drafter or measure")
    plan = with_values(TOY if "toy" in words else Plan(), values)
    results = bench_real(plan, work, until, tell)
    if results is None:
        return None
    for name, measured in results["measured"].items():
        print(f"{name}\n\n{format_bench(measured)}\n")
    return write(called("real", words, "temperatures"), results, measured, folder)


def attention(words: Sequence[str], folder: Path) -> Path:
    """Run the third check: time the attention backends."""
    sys.path.insert(0, str(HERE))
    try:
        from attention import main as measure
    finally:
        sys.path.remove(str(HERE))
    written: Path = measure(list(words), folder)
    return written


def with_values(plan: Any, values: dict[str, str]) -> Any:
    """Return the plan with some fields, or those of the dataclasses in it, replaced."""
    left = dict(values)
    for field in fields(plan):
        now = getattr(plan, field.name)
        if field.name in left:
            plan = replace(plan, **{field.name: read(left.pop(field.name), now)})
        elif is_dataclass(now):
            own = {f.name: left.pop(f.name) for f in fields(now) if f.name in left}
            plan = replace(plan, **{field.name: with_values(now, own) if own else now})
    if left:
        raise SystemExit(f"no key {', '.join(sorted(left))}; see the top of {__file__}")
    return plan


def read(text: str, now: Any) -> Any:
    """Parse a value of the same type as ``now``."""
    if isinstance(now, str):
        return text
    if isinstance(now, tuple):
        parts = text.split(";") if any(isinstance(each, str) for each in now) else text.split(",")
        return tuple(read(part, now[0] if now else 0) for part in parts)
    return json.loads(text)


def called(check: str, words: Sequence[str], key: str) -> str:
    """Name the check with what it was limited to, so that its calls do not overwrite each other."""
    chosen = pairs(words, flags=FLAGS).get(key)
    return check if chosen is None else f"{check}-{chosen.replace(',', '-')}"


def write(check: str, results: dict[str, Any], measured: dict[str, Any], folder: Path) -> Path:
    """Write the results, and return their file."""
    from falcon_lab.measure.results import write_results

    return write_results(results_path(folder, f"gpu-{check}", measured), results)


def quietly() -> None:
    """Suppress Hugging Face's remarks on settings that are intended."""
    import transformers

    transformers.logging.set_verbosity_error()


if __name__ == "__main__":
    print(main(sys.argv[1:]))
