"""Show the results of tuning: tables, plots as SVG, and the tree as YAML; from results alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.files import write_atomically
from falcon_lab.measure.results import refuse_foreign
from falcon_lab.report import method_plots
from falcon_lab.report.methods import IDENTICAL, NODES, PASSES, exclamations, name_of, warnings
from falcon_lab.report.plots import BASELINE, COLOURS, Curve, Panel, line_plot
from falcon_lab.report.tables import Column, Table, decimals, percent, times

Results = Mapping[str, Any]

SHOWN = 4
"""Ranks that have a line."""


# --- plots --------------------------------------------------------------------------------------


def write_plots(folder: Path, results: Results) -> list[Path]:
    """Write ``costs.svg``, ``acceptance.svg`` and ``speedups.svg``."""
    return [write_atomically(folder / f"{name}.svg", plot(results)) for name, plot in PLOTS.items()]


def costs(results: Results) -> str:
    """Draw the milliseconds of a target pass by draft tokens, beside those of a plain step."""
    found = results["tune"]["costs"]
    nodes, seconds = zip(*found["verify"], strict=True)
    step = [1000 * found["step"]] * 2
    lines = [
        Curve(nodes, [1000 * s for s in seconds], COLOURS[0], "verify"),
        Curve((nodes[0], nodes[-1]), step, BASELINE, "plain step", style="--", marker=""),
    ]
    panel = Panel(lines, "Cost of a target pass", "draft tokens", "ms", bottom=0)
    return line_plot([panel], "tune-costs", width=6)


def acceptance(results: Results) -> str:
    """Draw acceptance by depth and rank, of rounds whose path is right up to there."""
    tables = results["tune"]["acceptance"]
    panels = [
        Panel(
            [
                Curve(
                    [row["depth"] for row in tables[key]],
                    [100 * row["ranks"][rank] for row in tables[key]],
                    COLOURS[rank],
                    f"rank {rank}",
                )
                for rank in range(SHOWN)
            ],
            title,
            "depth",
            "accepted, %" if key == "any" else "",
            whole=True,
            legend=key == "first",
        )
        for key, title in {"any": "path right", "first": "path of first candidates"}.items()
    ]
    return line_plot(panels, "tune-acceptance", share_y=True)


def speedups(results: Results) -> str:
    """Draw the predicted and the measured speed-up of every tree."""
    predicted = {n: found["speedup"]["ratio"] for n, found in results["tune"]["predicted"].items()}
    return method_plots.speedups({n: results["methods"][n] for n in predicted}, predicted)


PLOTS = {"costs": costs, "acceptance": acceptance, "speedups": speedups}
"""Name of the file -> what draws it."""


# --- tables -------------------------------------------------------------------------------------


def format_tune(results: Results) -> str:
    """Write the tables of tuning: costs, acceptance, and every tree predicted and measured.

    Args:
        results: of ``tune``.
    """
    found = results["tune"]
    trees = Table(_columns(found), list(results["methods"].values()), _notes(results))
    return "\n\n".join([_costs(found), _acceptance(found["acceptance"]["any"]), trees.text()])


def _costs(found: Mapping[str, Any]) -> str:
    costs = found["costs"]
    headers = ["draft tokens", *(f"{nodes:.3g}" for nodes, _ in costs["verify"])]
    curve = Table.of(headers, [["verify, ms", *(f"{1000 * s:.2f}" for _, s in costs["verify"])]])
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


def _acceptance(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no round had a token to be found"
    ranks = [f"rank {rank}" for rank in range(len(rows[0]["ranks"]))]
    columns = [
        Column("accepted, %", "depth", "depth {}".format),
        *(Column(name, name, percent()) for name in ranks),
        Column("beyond", "beyond", percent()),
        Column("rounds", "rounds"),
    ]
    records = [{**row, **dict(zip(ranks, row["ranks"], strict=True))} for row in rows]
    return Table(columns, records).text()


def _columns(found: Mapping[str, Any]) -> list[Column]:
    """Return the columns of the trees; ``*`` marks the chosen one."""

    def name(s: Mapping[str, Any]) -> str:
        return f"{name_of(s['method'], s)}{' *' if s['method'] == found['chosen'] else ''}"

    def predicted(key: str) -> Callable[[Mapping[str, Any]], Any]:
        return lambda s: found["predicted"].get(s["method"], {}).get(key)

    def milliseconds(s: Mapping[str, Any]) -> float | None:
        speed = s["decode_tokens_per_second"]
        return 1000 * (s["tau"] or 1.0) / speed if speed else None

    return [
        Column("tree", name),
        NODES,
        PASSES,
        Column("τ pred.", predicted("tau"), decimals(2)),
        Column("τ", "tau", decimals(2)),
        Column("ms a round pred.", predicted("milliseconds"), decimals(2)),
        Column("ms", milliseconds, decimals(2)),
        Column("speed-up predicted [95 %]", predicted("speedup"), times),
        Column("measured [95 %]", "speedup", times),
        Column("chosen over it [95 %]", lambda s: found["over"].get(s["method"]), times),
        IDENTICAL,
    ]


def _notes(results: Results) -> list[str]:
    found = results["tune"]
    texts, limits = found["texts"], found["limits"]
    trial = ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in found["trial"].items())
    notes = [
        f"Tuned on the target's greedy answers to {texts['count']} prompts of {limits['source']} "
        f"({texts['tokens']} tokens, {found['rounds']} rounds); measured on other prompts, in one "
        "process and in turns.",
        "Accepted: share of the rounds whose true token is the candidate of that rank, the path "
        "before it being right.",
        f"* is chosen, {results['labels'][found['chosen']]}: the tuned static tree, unless another "
        f"was clearly faster on {limits['source']} ({trial}).",
    ]
    if results["experiment"]["evaluation"]["temperature"] > 0:
        notes.append("Predictions are those of greedy decoding, which stands in for sampling here.")
    return notes + exclamations(warnings(results))


# --- the tree's YAML ----------------------------------------------------------------------------


HEADER = """\
# A tree for {drafter} on {machine}, tuned by falcon-lab on {date}: {tokens:.2f} tokens in
# {milliseconds:.2f} ms a round are expected.
#
#     lightning run EXPERIMENT.yaml {name}
#     falcon-lab bench --drafter DRAFTER --tree {name}
"""


def fragment(results: Mapping[str, Any], name: str) -> str:
    """Return the text of a YAML with the tuned tree.

    Args:
        results: of ``tune``.
        name: of the file, for the comment.
    """
    found = results["tune"]
    estimate = found["predicted"][found["chosen"]]
    rows = results["experiment"]["evaluation"]["methods"]
    head = HEADER.format(
        drafter=Path(rows[found["chosen"]]["drafter_path"] or "the drafter").name,
        machine=results["hardware"]["gpu"] or results["hardware"]["cpu"],
        date=results["date"][:10],
        tokens=estimate["tau"],
        milliseconds=estimate["milliseconds"],
        name=name,
    )
    # JSON in one line is YAML too, and quotes the zeros of paths.
    nodes = [f"{key}: {json.dumps(found[key])}\n" for key in ("tree", "controller")]
    if threads := results["experiment"]["evaluation"]["threads"]:
        nodes.append(f"evaluation: {json.dumps({'threads': threads})}\n")
    return head + "".join(nodes)


def write_fragment(path: Path, results: Mapping[str, Any]) -> Path:
    """Write the file whole or not at all."""
    return write_atomically(path, fragment(results, path.name))


def refuse_foreign_files(tables: Path, tree: Path) -> None:
    """Refuse to replace what another tuning has not written.

    Args:
        tables: the file of all results.
        tree: the YAML with the tree.

    Raises:
        FalconLabError: with what is in the way.
    """
    refuse_foreign(tables)
    there = [tree, *(tree.with_name(f"{name}.svg") for name in PLOTS)]
    if not tables.exists() and (foreign := [path for path in there if path.exists()]):
        raise FalconLabError(
            f"{foreign[0]}: would be replaced, and no tuning wrote it (there is no {tables.name} "
            "beside it); choose another folder with --into, or move it"
        )
