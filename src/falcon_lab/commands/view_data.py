"""``falcon-lab view-data``: samples with their loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import click

from falcon_lab.data.corpora import corpus
from falcon_lab.data.encoding import encode
from falcon_lab.schema import Experiment
from falcon_lab.targets.builtin import ensure_target


def show_samples(experiment: Experiment, samples: int, *, color: bool) -> None:
    """Show the first ``samples`` training documents as the target's tokenizer cuts them."""
    config = experiment.data
    target = ensure_target(experiment.target, lambda line: click.echo(line, err=True))
    documents = corpus(config.corpus, split="train", limit=samples, seed=config.seed)
    for document in islice(documents, samples):
        encoded = encode(document, target.tokenizer)
        mask = [bool(kept) for kept in encoded.loss_mask]
        click.echo(
            f"— {document.id} ({document.source}): {len(mask)} tokens, {sum(mask)} in the loss",
            err=True,
        )
        for text, kept in pieces(encoded.tokens, mask, target.tokenizer):
            click.echo(mark(text, color=color) if kept else text, nl=False, color=color)
        click.echo()


def pieces(
    tokens: Sequence[int], mask: Sequence[bool], tokenizer: Any
) -> Iterator[tuple[str, bool]]:
    """Runs of tokens that are all in the loss, or all out of it, as text."""
    for kept, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
        ids = [int(token) for token, _ in run]
        yield tokenizer.decode(ids, skip_special_tokens=False), kept


def mark(text: str, *, color: bool) -> str:
    """Text in the loss: green, or in double brackets."""
    return click.style(text, fg="green") if color else f"[[{text}]]"
