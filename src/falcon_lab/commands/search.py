"""``search``: the options with which a method is fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from falcon_lab.commands.arguments import (
    COUNT,
    FOLDER,
    MOST,
    OVERRIDABLE,
    first_and_rest,
    overrides_of,
    progress,
    settings,
    words_argument,
)
from falcon_lab.config.load import load_experiment


@click.command(context_settings=OVERRIDABLE)
@words_argument("EXPERIMENT.yaml [KEY=VALUE]...")
@click.option("--method", required=True, help="Of evaluation.methods, with a drafter of its own.")
@click.option(
    "--over",
    multiple=True,
    required=True,
    help="drafter.skip_mlp=1..28, controller.threshold=0.2..0.9 or tree.depth=4,6,8; as often "
    "as there are options.",
)
@click.option(
    "--by",
    "objective",
    type=click.Choice(["speed", "cost"]),
    default="speed",
    show_default=True,
    help="Tokens a second, or tokens a decode step's work by the weights that passes read.",
)
@click.option(
    "--node-cost",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="With --by cost: of a draft token in a verification, in decode steps.",
)
@click.option("--attempts", type=COUNT, default=200, show_default=True, help="In all.")
@click.option(
    "--sampler",
    type=click.Choice(["gp", "tpe"]),
    default="gp",
    show_default=True,
    help="A Gaussian process, or a tree of Parzen estimators.",
)
@click.option(
    "--prompts",
    "source",
    default="validation",
    show_default=True,
    help="What is answered: a set or a JSONL file, as evaluation.prompts.name.",
)
@click.option("--texts", type=COUNT, default=4, show_default=True, help="Of them.")
@click.option(
    "--tokens", type=click.IntRange(2, MOST), default=32, show_default=True, help="Of an answer."
)
@settings("seed")
@click.option(
    "--into",
    type=FOLDER,
    default=Path("searched"),
    show_default=True,
    help="Folder for searched.yaml and search.jsonl.",
)
def search(words: tuple[str, ...], into: Path, seed: int | None, **options: Any) -> None:
    """Find options of a method's components by Bayesian optimisation (needs optuna).

    Every attempt answers the same few prompts, which are not those of the measurement. The best
    options so far are in searched.yaml, an override: lightning run EXPERIMENT.yaml searched.yaml.
    The same command goes on where it was interrupted; with more --attempts it looks further.
    """
    path, overrides = first_and_rest(words, "an experiment's YAML")
    experiment = load_experiment(Path(path), overrides_of({"seed": seed}, overrides))

    from falcon_lab.studies.search.stage import FOUND, Plan
    from falcon_lab.studies.search.stage import search as search_options

    best = search_options(experiment, Plan(into=into, **options), progress)
    share = best.accepted / max(best.drafted, 1)
    click.echo(
        f"best score {best.score:.4g}: {share:.0%} of {best.drafted} draft tokens accepted, "
        f"{best.tokens / max(best.rounds, 1):.2f} tokens a round\n{into / FOUND}"
    )
