"""The whole mask against a prefix without one: what reading a tree costs as its context grows.

Shapes: N nodes of a tree, P tokens of its context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from falcon_lab.config.schema import dtype_name
from falcon_lab.measure import provenance
from falcon_lab.model.attention.backend import Backend
from falcon_lab.model.attention.choosing import (
    SDPA,
    AttentionShape,
    Timing,
    calls,
    pick,
    time_attention,
)
from falcon_lab.model.attention.kernels import KERNELS
from falcon_lab.model.attention.merged import Merged
from falcon_lab.report.tables import Table

CONTEXTS = (512, 4096, 16384, 32768)
ROWS = (1, 16, 64)


def bench_attention(
    shapes: Mapping[str, AttentionShape],
    *,
    contexts: Sequence[int] = CONTEXTS,
    rows: Sequence[int] = ROWS,
    seconds: float = 0.5,
    announce: Callable[[str], None],
) -> dict[str, Any]:
    """Time every backend that runs here on one layer of every shape.

    Args:
        shapes: by name, all on one device.
        contexts: P.
        rows: N for each of them.
        seconds: for each backend, context and N.
        announce: is called with one line for the user at a time.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware``, ``git``, and ``shapes``: what
        ``bench_shape`` says of each.
    """
    device = next(iter(shapes.values())).device
    header = provenance.header(device=str(device))
    measured = {}
    for name, shape in shapes.items():
        announce(f"{name}: attention of {_words(shape)}")
        measured[name] = bench_shape(shape, contexts=contexts, rows=rows, seconds=seconds)
    return {
        **header,
        "shapes": measured,
    }


def bench_shape(
    shape: AttentionShape, *, contexts: Sequence[int], rows: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Time one shape through every backend.

    Returns:
        ``shape``; ``left_out``, kernel -> why it cannot run; ``timings``, each with ``backend``,
        ``context``, ``rows``, ``seconds``, ``over_sdpa`` (sdpa's time over its own) and ``off``
        (the largest difference from sdpa's output); ``picked``, what ``target.attention: auto``
        would take for these trees of the most nodes, as ``[backend, least context]`` or null.
    """
    facts = (shape.device, shape.dtype, shape.head_size)
    refusals = {kernel.name: kernel.refuses(*facts) for kernel in KERNELS}
    backends = {k.name: Merged(k) for k in KERNELS if refusals[k.name] is None}
    timings = list(time_attention(backends, shape, contexts, rows, seconds=seconds))
    sdpa = {(t.context, t.rows): t.seconds for t in timings if t.backend == SDPA}
    return {
        "shape": asdict(shape) | {"device": str(shape.device), "dtype": str(shape.dtype)},
        "left_out": {name: reason for name, reason in refusals.items() if reason is not None},
        "timings": [
            asdict(timing)
            | {
                "over_sdpa": sdpa[timing.context, timing.rows] / timing.seconds,
                "off": difference(backends, shape, timing),
            }
            for timing in timings
        ],
        "picked": pick([timing for timing in timings if timing.rows == max(rows)]),
    }


@torch.inference_mode()
def difference(backends: Mapping[str, Backend], shape: AttentionShape, timing: Timing) -> float:
    """How far a backend's output is from sdpa's in what was timed, at the most."""
    found = calls(backends, shape, timing.context, timing.rows)
    ours, theirs = found[timing.backend]().float(), found[SDPA]().float()
    return float((ours.flatten() - theirs.flatten()).abs().max())


def format_attention(results: Mapping[str, Any]) -> str:
    """Write a table for every shape: milliseconds of a layer, and how many times sdpa's speed."""
    tables = []
    for name, measured in results["shapes"].items():
        names = list(dict.fromkeys(timing["backend"] for timing in measured["timings"]))
        rows = []
        for at in dict.fromkeys((t["context"], t["rows"]) for t in measured["timings"]):
            cells = [t for t in measured["timings"] if (t["context"], t["rows"]) == at]
            rows.append([*at, *map(_cell, cells)])
        left_out = [f"{kernel}: {reason}" for kernel, reason in measured["left_out"].items()]
        table = Table.of(("context", "rows", *names), rows)
        tables.append("\n".join([f"{name} (ms a layer)", table.text(), *left_out]))
    return "\n\n".join(tables)


def _cell(timing: Mapping[str, Any]) -> str:
    shown = f"{1000 * timing['seconds']:.3f}"
    return shown if timing["backend"] == SDPA else f"{shown} ({timing['over_sdpa']:.2f}×)"


def _words(shape: AttentionShape) -> str:
    dtype = dtype_name(shape.dtype)
    heads = f"{shape.heads} query and {shape.groups} key heads of {shape.head_size} numbers"
    return f"{heads}, {dtype} on {shape.device}"
