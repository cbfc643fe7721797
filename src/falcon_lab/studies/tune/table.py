"""Plots of tuning, as SVG files: costs, acceptance, and predicted beside measured speed-up.

What tuning found as aligned plain text. Works on the results alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from falcon_lab.files import replacing
from falcon_lab.report.plots import BASELINE, COLOURS, draw
from falcon_lab.studies.evaluate import (
    NOTHING,
    align,
    identical_text,
    name_of,
    number,
    percent,
    speedup_text,
    warnings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 4
"""Ranks that have a line."""


def write_plots(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """``costs.svg``, ``acceptance.svg`` and ``speedups.svg``."""
    written = []
    for name, plot in (("costs", costs), ("acceptance", acceptance), ("speedups", speedups)):
        path = folder / f"{name}.svg"
        with replacing(path) as temporary:
            temporary.write_text(plot(results), encoding="utf-8")
        written.append(path)
    return written


def costs(results: Mapping[str, Any]) -> str:
    """Milliseconds of a target pass by draft tokens."""
    found = results["tune"]["costs"]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        nodes, seconds = zip(*found["verify"], strict=True)
        axis.plot(nodes, [1000 * s for s in seconds], marker="o", color=COLOURS[0], label="verify")
        axis.axhline(1000 * found["step"], color=BASELINE, linestyle="--", label="plain step")
        axis.set_ylim(bottom=0)
        axis.set_title("Cost of a target pass")
        axis.set_xlabel("draft tokens")
        axis.set_ylabel("ms")
        axis.legend()

    return draw(6, 3, paint, "tune-costs")


def acceptance(results: Mapping[str, Any]) -> str:
    """Acceptance by depth, a line for each of the first ranks; given that the path is right."""
    tables = results["tune"]["acceptance"]

    def paint(figure: Figure) -> None:
        panels = {"path right": "any", "path of first candidates": "first"}
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (title, key) in zip(axes, panels.items(), strict=True):
            depths = [row["depth"] for row in tables[key]]
            for rank in range(SHOWN):
                shares = [100 * row["ranks"][rank] for row in tables[key]]
                axis.plot(depths, shares, marker="o", color=COLOURS[rank], label=f"rank {rank}")
            axis.set_title(title)
            axis.set_xlabel("depth")
        axes[0].set_ylabel("accepted, %")
        axes[1].legend()

    return draw(9, 3, paint, "tune-acceptance")


def speedups(results: Mapping[str, Any]) -> str:
    """Predicted and measured speed-up of every tree."""
    predicted = results["tune"]["predicted"]
    names = list(predicted)[::-1]
    measured = [results["methods"][name]["speedup"] for name in names]

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        places = range(len(names))
        axis.plot(
            [predicted[name]["speedup"]["ratio"] for name in names],
            places,
            "o",
            color=COLOURS[2],
            label="predicted",
        )
        axis.errorbar(
            [m["ratio"] for m in measured],
            places,
            xerr=[
                [m["ratio"] - (m["low"] or m["ratio"]) for m in measured],
                [(m["high"] or m["ratio"]) - m["ratio"] for m in measured],
            ],
            fmt="s",
            color=COLOURS[0],
            label="measured, 95 %",
        )
        axis.set_yticks(places, names)
        axis.set_xlabel("speed-up over plain decoding")
        axis.legend()

    return draw(7, 0.35 * len(names) + 1, paint, "tune-speedups")


ROWS = (
    "tree",
    "nodes",
    "passes",
    "τ pred.",
    "τ",
    "ms a round pred.",
    "ms",
    "speed-up predicted [95 %]",
    "measured [95 %]",
    "chosen over it [95 %]",
    "identical",
)


def format_tune(results: Mapping[str, Any]) -> str:
    """The tables of tuning: costs, acceptance, and every tree predicted and measured.

    Args:
        results: of ``tune``.
    """
    found = results["tune"]
    rows = [_row(name, s, found) for name, s in results["methods"].items()]
    blocks = [_costs(found), _acceptance(found["acceptance"]["any"]), align([ROWS, *rows])]
    return "\n\n".join([*blocks, "\n".join(_notes(results))])


def _costs(found: Mapping[str, Any]) -> str:
    costs = found["costs"]
    points = [(n, 1000 * s) for n, s in costs["verify"]]
    curve = align(
        [
            ("draft tokens", *(f"{n:.3g}" for n, _ in points), ""),
            ("verify, ms", *(f"{ms:.2f}" for _, ms in points), ""),
        ]
    )
    parts = {
        "first pass": costs["first"],
        "later pass": costs["later"],
        "each further block": costs["block"],
        "confidence, a pass": costs["asking"],
        "rest of a round": costs["fixed"],
        "plain step": costs["step"],
        **{f"{name}, more a pass": seconds for name, seconds in costs["builders"].items()},
    }
    listed = ", ".join(f"{name} {1000 * seconds:.2f}" for name, seconds in parts.items())
    return f"{curve}\nms: {listed}"


def _acceptance(table: Sequence[Mapping[str, Any]]) -> str:
    if not table:
        return "no round had a token to be found"
    ranks = len(table[0]["ranks"])
    head = ("accepted, %", *(f"rank {r}" for r in range(ranks)), "beyond", "rounds")
    rows = [
        (
            f"depth {row['depth']}",
            *(percent(share) for share in row["ranks"]),
            percent(row["beyond"]),
            str(row["rounds"]),
        )
        for row in table
    ]
    return align([head, *rows])


def _row(name: str, summary: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    predicted = found["predicted"].get(name)
    over = found["over"].get(name)
    marked = f"{name_of(name, summary)}{' *' if name == found['chosen'] else ''}"
    per_token = summary["decode_tokens_per_second"]
    tau = summary["tau"] or 1.0
    return (
        marked,
        number(summary["nodes_per_round"], 1),
        number(summary["passes_per_round"], 1),
        number(predicted["tau"] if predicted else None, 2),
        number(summary["tau"], 2),
        number(predicted["milliseconds"] if predicted else None, 2),
        number(1000 * tau / per_token if per_token else None, 2),
        speedup_text(predicted["speedup"]) if predicted else NOTHING,
        speedup_text(summary["speedup"]),
        speedup_text(over),
        identical_text(summary),
    )


def _notes(results: Mapping[str, Any]) -> list[str]:
    found = results["tune"]
    texts, limits = found["texts"], found["limits"]
    notes = [
        f"Tuned on the target's greedy answers to {texts['count']} prompts of {limits['source']} "
        f"({texts['tokens']} tokens, {found['rounds']} rounds); measured on other prompts, in one "
        "process and in turns.",
        "Accepted: share of the rounds whose true token is the candidate of that rank, the path "
        "before it being right.",
        f"* is chosen, {results['labels'][found['chosen']]}: the tuned static tree, unless another "
        f"was clearly faster on {limits['source']} ({_trial(found['trial'])}).",
    ]
    if results["experiment"]["evaluation"]["temperature"] > 0:
        notes.append("Predictions are those of greedy decoding, which stands in for sampling here.")
    return notes + [f"! {line}" for line in warnings(results)]


def _trial(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items())
