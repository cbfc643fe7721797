"""``plan``: what training at scale would take, by arithmetic."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from falcon_lab.commands.arguments import (
    FOLDER,
    OVERRIDABLE,
    first_and_rest,
    overrides_of,
    settings,
    words_argument,
)
from falcon_lab.commands.streams import terminal_width
from falcon_lab.config.load import load_experiment
from falcon_lab.config.overrides import is_yaml
from falcon_lab.config.saved import run_experiment
from falcon_lab.config.schema import Experiment
from falcon_lab.config.trainer import training_tokens
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.discovery import load_components
from falcon_lab.report.tables import Column, Table, percent

if TYPE_CHECKING:
    from falcon_lab.studies.scale.arithmetic import Assumed, Hardware
    from falcon_lab.studies.scale.counting import Sizes

HERE = "here"
"""Hardware that is measured now."""
SHAPE = ("hidden", "layers", "vocab")

COUNTS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
BYTES |= {"KIB": 2.0**10, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}


class Quantity(click.ParamType[float]):
    """A number with a unit: ``70B``, ``80GB``, ``3.35TB``, ``990e12``.

    Args:
        units: unit in capitals -> what it stands for.
        example: for those who write another.
    """

    name = "number"

    def __init__(self, units: dict[str, float], example: str) -> None:
        self.units, self.example = units, example

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number.

        Raises:
            FalconLabError: it is none, or not above zero.
        """
        found = re.fullmatch(
            r"\s*(\d[\d_]*\.?\d*(?:[eE][+-]?\d{1,3})?)\s*([a-zA-Z]*)\s*", str(value)
        )
        unit = self.units.get(found[2].upper()) if found else None
        number = float(found[1].replace("_", "")) if found else 0.0
        if unit is None or not 0 < number * unit < 1e30:
            option = param.opts[0] if param else "a number"
            raise FalconLabError(f"{option} is {value!r:.60}; write it as in {self.example}")
        return number * unit


COUNT, SIZE = Quantity(COUNTS, "70B, 1.5T or 990e12"), Quantity(BYTES, "80GB, 141GB or 3.35TB")
WHOLE = click.IntRange(1, 2**31)
SHARE = click.FloatRange(0, 1, min_open=True)


@click.command(context_settings=OVERRIDABLE)
@words_argument("[EXPERIMENT.yaml] [KEY=VALUE]...")
@settings("target")
@click.option("--parameters", type=COUNT, help="Of a target without a name, as in 70B.")
@click.option("--hidden", type=WHOLE, help="Its hidden size.")
@click.option("--layers", type=WHOLE, help="Its layers.")
@click.option("--vocab", type=WHOLE, help="Its vocabulary.")
@click.option("--active", type=COUNT, help="Weights that a token uses, of a mixture of experts.")
@click.option(
    "--tokens", type=COUNT, help="Of the data, as in 1B.  [default: of the recipe's steps]"
)
@click.option(
    "--epochs",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=1,
    show_default=True,
    help="Passes over them.",
)
@click.option("--hardware", help="a100, h100, h200, or here: measured now.  [default: h100]")
@click.option("--devices", type=WHOLE, default=1, show_default=True, help="Of that hardware.")
@click.option("--flops", type=COUNT, help="Of a device, in place of the sheet's: 990e12.")
@click.option("--bandwidth", type=SIZE, help="Of its memory, a second: 3.35TB.")
@click.option("--memory", type=SIZE, help="Of a device: 80GB.")
@click.option("--utilisation", type=SHARE, help="Of the operations by passes.  [default: 0.4]")
@click.option("--reach", type=SHARE, help="Of the bandwidth by decoding.  [default: 0.6]")
@click.option("--sequences", type=WHOLE, help="Decoded together on a replica.  [default: 64]")
@click.option("--measured", type=FOLDER, help="Compare with what this finished run measured.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(words: Sequence[str], measured: Path | None, as_json: bool, **options: Any) -> None:
    """Say what it would take to train a drafter: bytes, devices and hours, with what is assumed.

    Target, drafter and data are those of a recipe, or are given: falcon-lab plan --target NAME
    --tokens 1B drafter.name=eagle3 --devices 8. Nothing is loaded or written.
    """
    experiment = _experiment(words, measured, options)
    sizes = _sizes(options)
    from falcon_lab.studies.scale import counting
    from falcon_lab.studies.scale.arithmetic import as_dict, figures, sentences

    components = load_components()
    target = counting.outline(experiment.target, components, sizes)
    cost = counting.target_cost(target, experiment.data.length, _whole(options["active"]))
    drafter = counting.outlined_drafter(experiment.drafter, target, components)
    trained = counting.drafter_cost(drafter, experiment, target, components)
    tokens = _whole(options["tokens"]) or training_tokens(experiment)
    work = counting.work_of(experiment, target, drafter, tokens, options["epochs"])
    assumed = _assumed(options)
    hardware = _hardware(options, cost.moved, cost.precision, measured is not None)
    if measured is not None:
        from falcon_lab.studies.scale.measured import compare, rows

        compared = compare(measured, experiment, cost, trained, work, hardware, assumed)
        document: dict[str, Any] = {"compared": rows(compared)}
        shown = _comparison(rows(compared), sentences(hardware, assumed))
    else:
        found = figures(cost, trained, work, hardware, assumed)
        document = {"figures": as_dict(found)}
        shown = _figures(found, sentences(hardware, assumed))
    document |= {"hardware": asdict(hardware), "assumed": asdict(assumed), "work": asdict(work)}
    document |= {"target": asdict(cost), "drafter": trained and asdict(trained)}
    click.echo(json.dumps(document, indent=2) if as_json else shown)


def _experiment(words: Sequence[str], measured: Path | None, options: dict[str, Any]) -> Experiment:
    """Return the recipe, that of a run, or the defaults."""
    if measured is not None:
        return run_experiment(measured, overrides_of(options, words))
    recipe = any("=" not in word and not word.startswith("-") for word in words)
    if recipe:
        path, rest = first_and_rest(words, "an experiment's YAML")
        if not is_yaml(path):
            raise FalconLabError(f"{path}: no experiment's YAML; a target is given by --target")
        return load_experiment(path, overrides_of(options, rest))
    if not options["target"] and options["parameters"] is None:
        raise FalconLabError("name a recipe, a target (--target), or its size (--parameters 70B …)")
    if options["tokens"] is None:
        raise FalconLabError("say how many tokens the data have, as in --tokens 1B")
    return load_experiment(None, overrides_of(options, words))


def _sizes(options: dict[str, Any]) -> Sizes | None:
    """Return the sizes of a target without a name; None: it has one."""
    given = [name for name in SHAPE if options[name] is not None]
    if options["parameters"] is None:
        if given:
            raise FalconLabError(f"--{given[0]} is of a target without a name: add --parameters")
        return None
    if missing := [name for name in SHAPE if name not in given]:
        raise FalconLabError(f"--parameters needs --{' and --'.join(missing)} beside it")
    if options["target"]:
        raise FalconLabError("--parameters and --target are two targets; give one of them")
    from falcon_lab.studies.scale.counting import Sizes

    return Sizes(int(options["parameters"]), *(options[name] for name in SHAPE))


def _whole(number: float | None) -> int | None:
    return None if number is None else max(1, int(number))


def _assumed(options: dict[str, Any]) -> Assumed:
    from falcon_lab.studies.scale.arithmetic import Assumed

    names = ("utilisation", "reach", "sequences")
    return Assumed(**{name: options[name] for name in names if options[name] is not None})


def _hardware(options: dict[str, Any], moved: int, precision: str, of_a_run: bool) -> Hardware:
    """Return the devices: of a sheet or measured, with what was given in their place."""
    from falcon_lab.studies.scale.arithmetic import PRESETS

    name = options["hardware"] or (HERE if of_a_run else "h100")
    if name not in (*PRESETS, HERE):
        raise FalconLabError(f"--hardware is {name!r:.40}; choose {', '.join(PRESETS)} or {HERE}")
    base = PRESETS[name] if name != HERE else measured_hardware(moved, precision)
    fields = {"operations": "flops", "bandwidth": "bandwidth", "memory": "memory"}
    given = {field: options[key] for field, key in fields.items() if options[key] is not None}
    if given:
        source = f"{base.source}; given: {', '.join(given)}"
        base = replace(base, source="given" if len(given) == len(fields) else source, **given)
    return replace(base, devices=options["devices"])


def measured_hardware(moved: int, precision: str) -> Hardware:
    """Return what torch's threads reach here, by a copy and a matrix product.

    Args:
        moved: bytes that a pass of the target reads.
        precision: of the target.
    """
    import torch

    from falcon_lab.model.memory import free_memory
    from falcon_lab.studies.bench.machine import measure_machine
    from falcon_lab.studies.scale.arithmetic import Hardware

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = measure_machine(device, getattr(torch, precision), moved)
    return Hardware(
        HERE,
        1,
        found.operations_per_second,
        found.bytes_per_second,
        free_memory(device) or 0,
        f"measured now on {device.type}, {torch.get_num_threads()} threads, {precision}",
    )


def _figures(found: Sequence[Any], notes: list[str]) -> str:
    from falcon_lab.studies.scale.arithmetic import readable

    columns = [
        Column("of", lambda each: each.part, left=True),
        Column("figure", lambda each: each.what, left=True),
        Column("", lambda each: readable(each.value, each.unit)),
        Column("how", lambda each: each.how, left=True),
    ]
    return Table(columns, found, notes).text(terminal_width())


def _comparison(found: Sequence[Any], notes: list[str]) -> str:
    from falcon_lab.studies.scale.arithmetic import readable

    columns = [
        Column("figure", "what", left=True),
        Column("planned", lambda row: readable(row["planned"], row["unit"])),
        Column("measured", lambda row: readable(row["measured"], row["unit"])),
        Column("measured / planned", lambda row: f"{row['ratio']:.3g}"),
        Column("of the peak", "share_of_peak", percent(unit=" %")),
    ]
    return Table(columns, found, notes).text(terminal_width())
