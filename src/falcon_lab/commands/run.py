"""``falcon-lab run``: the experiment, or each of its variants with each of its seeds.

``falcon-lab evaluate DIR``: measure a saved drafter, or a run's.

``falcon-lab compare``: drafter heads on equal terms.

``falcon-lab view-data``: samples with their loss mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import click

from falcon_lab import experiment
from falcon_lab.config.schema import Experiment
from falcon_lab.data.corpora import corpus
from falcon_lab.data.view import spans
from falcon_lab.measure.results import write_results
from falcon_lab.pretraining.target import ensure_target
from falcon_lab.studies.compare.plan import Plan
from falcon_lab.studies.compare.report import format_comparison, write_page
from falcon_lab.studies.compare.stage import compare


def run_all(everything: list[tuple[str, int, Experiment]], announce: Callable[[str], None]) -> None:
    """Run what ``falcon_lab.config.load.variants`` returned."""
    if len(everything) == 1:
        experiment.run(everything[0][2], announce=announce)
    else:
        experiment.run_variants(everything, announce=announce)


def evaluate_folder(
    folder: Path, overrides: Sequence[str], announce: Callable[[str], None]
) -> None:
    """Measure the drafter in ``folder``, or in the run that ``folder`` holds."""
    experiment.evaluate_saved(folder, overrides, announce=announce)


def compare_heads(plan: Plan, announce: Callable[[str], None]) -> None:
    """Compare, print the tables, and write the results and the report into the plan's folder."""
    results = compare(plan, announce, partial(experiment.run, announce=announce))
    click.echo(format_comparison(results))
    into = write_results(plan.folder / f"{plan.base.name}.json", results)
    report = write_page(plan.folder / f"{plan.base.name}.html", results)
    click.echo(f"\nreport   {report}\nresults  {into}")


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
