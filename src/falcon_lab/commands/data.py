"""``data``: the machines of a Ray cluster make the data of an experiment."""

from __future__ import annotations

from collections.abc import Sequence

import click

from falcon_lab.commands.arguments import (
    COUNT,
    OVERRIDABLE,
    announce,
    first_and_rest,
    words_argument,
)
from falcon_lab.config.load import load_experiment
from falcon_lab.errors import FalconLabError


@click.command(context_settings=OVERRIDABLE)
@words_argument("EXPERIMENT.yaml [KEY=VALUE]...")
@click.option(
    "--ray",
    "address",
    required=True,
    help="The cluster: HOST:PORT, ray://HOST:PORT, auto, or local for actors of this machine.",
)
@click.option(
    "--actors", type=COUNT, help="Processes; else one a GPU, or one a machine without GPUs."
)
def data(words: Sequence[str], address: str, actors: int | None) -> None:
    """Let a Ray cluster write an experiment's texts (data.regenerate) and feature store.

    A run with the same settings finds them. The same command goes on where it stopped, and an actor
    that dies costs a part of 256 texts or a shard of features, which another one writes.
    """
    path, overrides = first_and_rest(words, "an experiment's YAML")
    experiment = load_experiment(path, overrides)
    if experiment.data.feature_store is None and not experiment.data.regenerate:
        raise FalconLabError(
            f"{path}: nothing to write; set data.feature_store to a folder, or data.regenerate"
        )
    from falcon_lab.cluster.build import build_data
    from falcon_lab.data.corpora import first_documents
    from falcon_lab.experiment import check_files

    check_files(experiment)
    # An unknown corpus is refused before a cluster is asked for.
    next(first_documents(experiment.data.corpus, 1, experiment.data.seed), None)
    build_data(experiment, address, actors, announce)
