"""Throughput against batch size as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.benchmarking.methods import PLAIN
from falcon_lab.evaluation.table import name_of
from falcon_lab.reporting.plots import BASELINE, COLOURS, STYLE
from falcon_lab.whole_file import replacing


def write_plot(path: Path, results: Mapping[str, Any]) -> Path:
    """A PNG: tokens a second of every method, and what it is over plain decoding of that size."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    methods, sizes = results["methods"], results["sizes"]
    drafting = dict(zip([name for name in methods if name != PLAIN], COLOURS, strict=False))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.6), layout="constrained", dpi=110)
        speed, ratio = figure.subplots(1, 2)
        plain = [one["tokens_per_second"] for one in methods[PLAIN]["batches"]]
        for name, found in methods.items():
            colour = drafting.get(name, BASELINE)
            points = [one["tokens_per_second"] for one in found["batches"]]
            over = [point / base for point, base in zip(points, plain, strict=True)]
            speed.plot(
                sizes, points, marker="o", markersize=4, color=colour, label=name_of(name, found)
            )
            ratio.plot(sizes, over, marker="o", markersize=4, color=colour)
        speed.set_title("Tokens a second")
        ratio.set_title("Over plain decoding of the same size")
        speed.legend()
        for panel in (speed, ratio):
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.set_xlabel("sequences side by side")
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})
    return path
