"""A benchmark as aligned plain text: speed first, then the rounds and their floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from falcon_lab.studies.bench import HF, METHODS
from falcon_lab.studies.evaluate import (
    NOTHING,
    align,
    identical_text,
    name_of,
    number,
    speedup_text,
    warnings,
)

SPEED = ("method", "tok/s", "speed-up [95 %]", "over HF", "τ", "memory MB", "identical")
ROUNDS = (
    "method",
    "draft",
    "verify",
    "accept",
    "commit",
    "other %",
    "rows",
    "pass ms",
    "floor ms",
    "of floor %",
)


def format_bench(results: Mapping[str, Any]) -> str:
    """The tables of a benchmark.

    Args:
        results: of ``bench_decoding``.
    """
    methods, found = results["methods"], results["bench"]["methods"]
    theirs = methods.get(METHODS[HF], {}).get("tokens_per_second")
    figure = "highest" if _on_gpu(results) else "growth"
    memory = {n: f["memory"][figure] / 1e6 if f["memory"] else None for n, f in found.items()}
    speed = [_speed(name, summary, memory[name], theirs) for name, summary in methods.items()]
    ours = [name for name in methods if found[name]["split"] is not None]
    rounds = [_rounds(name_of(name, methods[name]), found[name]) for name in ours]
    return "\n\n".join(
        [align([SPEED, *speed]), align([ROUNDS, *rounds]), "\n".join(_notes(results))]
    )


def _speed(
    name: str, summary: Mapping[str, Any], memory: float | None, theirs: float | None
) -> tuple[str, ...]:
    speed = summary["tokens_per_second"]
    return (
        name_of(name, summary),
        number(speed, 1),
        speedup_text(summary["speedup"]),
        f"{speed / theirs:.2f}×" if theirs else NOTHING,
        number(summary["tau"], 2),
        number(memory, 1),
        identical_text(summary),
    )


def _rounds(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    split, floor = found["split"], found["floor"]
    shares = [
        number(split[part], 1) for part in ("draft", "verify", "accept", "commit", "overhead")
    ]
    if floor is None:
        return (name, *shares, *[NOTHING] * 4)
    least = floor["reached"] * floor["milliseconds"]
    return (
        name,
        *shares,
        number(floor["rows"], 1),
        number(floor["milliseconds"], 2),
        number(least, 3),
        number(100 * floor["reached"], 1),
    )


def _on_gpu(results: Mapping[str, Any]) -> bool:
    return results["hardware"]["gpu"] is not None


def _notes(results: Mapping[str, Any]) -> list[str]:
    machine, cost = results["bench"]["machine"], results["bench"]["cost"]
    memory = "what one more answer adds to the process's resident memory at its highest point"
    if _on_gpu(results):
        memory = "torch's most on the GPU during one more answer, every method's weights in it"
    notes = [
        "Speed-up: wall time per token against plain decoding, in one process and in turns. Times "
        "in % of decoding.",
        f"Memory: {memory}.",
        f"Machine: {machine['bytes_per_second'] / 1e9:.1f} GB/s in copies of "
        f"{machine['copied_bytes'] / 1e6:.0f} MB, {machine['operations_per_second'] / 1e9:.0f} "
        f"GFLOP/s in {machine['dtype'].removeprefix('torch.')}, "
        f"{results['hardware']['threads']} threads.",
    ]
    if cost is not None:
        notes.append(
            f"Floor: a pass moves at least {cost['weight_bytes'] / 1e6:.1f} MB of weights and does "
            f"{2 * cost['weights'] / 1e6:.1f} MFLOP a row, and what its context adds; the slower "
            "of the two counts."
        )
    notes += [f"! {line}" for line in warnings(results)]
    notes += [f"Left out: {name} ({why})" for name, why in results["left_out"].items()]
    return notes
