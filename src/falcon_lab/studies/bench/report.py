"""Show a benchmark's results: tables of methods and their rounds, and of batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import PLAIN
from falcon_lab.files import write_atomically
from falcon_lab.report.methods import (
    IDENTICAL,
    METHOD,
    SPEED,
    SPEEDUP,
    TAU,
    exclamations,
    join,
    left_out,
    name_of,
    warnings,
)
from falcon_lab.report.plots import BASELINE, Curve, Panel, colours_of, line_plot
from falcon_lab.report.tables import Column, Table, decimals, percent
from falcon_lab.studies.bench import HF, LLAMA_CPP, METHODS

Results = Mapping[str, Any]


def format_bench(results: Results) -> str:
    """Write the tables of a benchmark: speed first, then the rounds and their floor.

    Args:
        results: of ``bench_decoding``.
    """
    methods, found = results["methods"], results["bench"]["methods"]
    theirs = methods.get(METHODS[HF], {}).get("tokens_per_second")
    memory = "highest" if _on_gpu(results) else "growth"
    speed = (
        METHOD,
        SPEED,
        SPEEDUP,
        Column(
            "over HF",
            lambda s: s["tokens_per_second"] / theirs if theirs else None,
            decimals(2, unit="×"),
        ),
        TAU,
        Column(
            "memory MB",
            lambda s: (found[s["method"]]["memory"] or {}).get(memory),
            decimals(1, scale=1e-6),
        ),
        IDENTICAL,
    )
    rounds = [{**methods[n], **found[n]} for n in methods if found[n]["split"] is not None]
    return join([Table(speed, list(methods.values())), Table(ROUNDS, rounds)], _notes(results))


def _share(part: str, header: str = "") -> Column:
    return Column(header or part, lambda record: record["split"][part], decimals(1))


def _floor(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda record: (record["floor"] or {}).get(key)


def _floor_milliseconds(record: Mapping[str, Any]) -> float | None:
    floor = record["floor"]
    return floor["reached"] * floor["milliseconds"] if floor else None


ROUNDS = (
    METHOD,
    *(_share(part) for part in ("draft", "verify", "accept", "commit")),
    _share("overhead", "other %"),
    Column("rows", _floor("rows"), decimals(1)),
    Column("pass ms", _floor("milliseconds"), decimals(2)),
    Column("floor ms", _floor_milliseconds, decimals(3)),
    Column("of floor %", _floor("reached"), percent(1)),
)


def _on_gpu(results: Results) -> bool:
    return results["hardware"]["gpu"] is not None


def _notes(results: Results) -> list[str]:
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
    if METHODS[LLAMA_CPP] in results["methods"]:
        notes.append(
            f"{METHODS[LLAMA_CPP]} computes with the file's quantised weights, the other methods "
            "with the numbers that they stand for: its tokens may differ."
        )
    return [*notes, *exclamations(warnings(results)), *left_out(results)]


# --- batches ------------------------------------------------------------------------------------


def format_batches(results: Results) -> str:
    """Write tokens a second by batch size, and their ratio to plain decoding of the same size.

    Args:
        results: of ``bench_batches``.
    """
    plain = _speeds(results["methods"][PLAIN])
    headers = ("tok/s (over plain)", "alone", *(f"B = {size}" for size in results["sizes"]))
    rows = []
    for name, found in results["methods"].items():
        ratios = zip(_speeds(found), plain, strict=True)
        cells = (f"{speed:.0f} ({speed / base:.2f}×)" for speed, base in ratios)
        rows.append((name_of(name, found), *cells))
    notes = [
        f"{results['prompts']} prompts, all of the time counted; alone: the engine for one "
        "sequence.",
        *(["Seconds of a core, not of the clock on the wall."] * (results["clock"] == "cpu")),
        *exclamations(_differing(results)),
        *left_out(results),
    ]
    return Table.of(headers, rows, notes).text()


def _speeds(found: Mapping[str, Any]) -> list[float]:
    return [one["tokens_per_second"] for one in (found["alone"], *found["batches"])]


def _differing(results: Results) -> list[str]:
    """Return where texts are not plain decoding's, though they should be."""
    if results["experiment"]["evaluation"]["temperature"]:
        return []
    return [
        f"{name}, B = {one['size']}: {one['identical']:.0%} of the texts are plain decoding's"
        for name, found in results["methods"].items()
        for one in (found["alone"], *found["batches"])
        if found["lossless"] and one["identical"] < 1
    ]


def write_batches_plot(path: Path, results: Results) -> Path:
    """Write an SVG of every method's tokens a second, and of their ratio to plain decoding's."""
    return write_atomically(path, batches_plot(results))


def batches_plot(results: Results) -> str:
    """Draw tokens a second against batch size, and the ratio to plain decoding of that size."""
    methods, sizes = results["methods"], results["sizes"]
    colour = {PLAIN: BASELINE, **colours_of([name for name in methods if name != PLAIN])}
    plain = _speeds(methods[PLAIN])[1:]
    titles = {False: "Tokens a second", True: "Over plain decoding of the same size"}
    panels = [
        Panel(
            [
                Curve(
                    sizes,
                    [
                        speed / base if ratio else speed
                        for speed, base in zip(_speeds(found)[1:], plain, strict=True)
                    ],
                    colour[name],
                    name_of(name, found),
                )
                for name, found in methods.items()
            ],
            title,
            "batch size",
            ticks=sizes,
            log="x",
            bottom=0,
            legend=not ratio,
        )
        for ratio, title in titles.items()
    ]
    return line_plot(panels, "batches", height=3.6)
