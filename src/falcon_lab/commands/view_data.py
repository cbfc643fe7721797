"""``falcon-lab view-data``: samples with their loss mask."""

from __future__ import annotations

from itertools import islice

import click

from falcon_lab.data.corpora import corpus
from falcon_lab.data.view import spans
from falcon_lab.schema import Experiment
from falcon_lab.targets.builtin import ensure_target


def show_samples(experiment: Experiment, samples: int, *, color: bool) -> None:
    """Show the first ``samples`` training documents as the target's tokenizer cuts them."""
    config = experiment.data
    target = ensure_target(experiment.target, lambda line: click.echo(line, err=True))
    documents = corpus(config.corpus, split="train", limit=samples, seed=config.seed)
    for document in islice(documents, samples):
        click.echo(f"— {document.id} ({document.source})", err=True)
        for text, learnt in spans(document, target.tokenizer):
            click.echo(mark(text, color=color) if learnt else text, nl=False, color=color)
        click.echo()


def mark(text: str, *, color: bool) -> str:
    """Text in the loss: green, or in double brackets."""
    return click.style(text, fg="green") if color else f"[[{text}]]"
