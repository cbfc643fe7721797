"""``run``, ``evaluate``, ``compare`` and ``view-data``: from a YAML or a folder to results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import click

from falcon_lab.commands.arguments import (
    COUNT,
    OVERRIDABLE,
    announce,
    first_and_rest,
    no_color_option,
    progress,
    wants_color,
    words_argument,
)
from falcon_lab.config.load import dump, load_experiment
from falcon_lab.config.overrides import is_yaml, plain_overrides
from falcon_lab.config.saved import saved_experiment
from falcon_lab.errors import FalconLabError, did_you_mean
from falcon_lab.plugins.discovery import load_components
from falcon_lab.studies.compare.loading import is_short_form, load_plan, plan_of_runs
from falcon_lab.studies.compare.plan import Plan, describe


@click.command(context_settings=OVERRIDABLE)
@words_argument("EXPERIMENT.yaml [KEY=VALUE]...")
@click.option(
    "--dry-run", is_flag=True, help="Check keys and files, print the resolved experiment and stop."
)
def run(words: Sequence[str], dry_run: bool) -> None:
    """Train and measure what the YAML says. Overrides: tree.depth=6, or --tree.depth=6.

    With variants or seeds it is a comparison, as of falcon-lab compare.
    """
    path, overrides = first_and_rest(words, "an experiment's YAML")
    if is_short_form(Path(path), overrides):
        carry_out(load_plan(Path(path), overrides), dry_run=dry_run)
        return
    chosen = load_experiment(path, overrides)
    from falcon_lab import experiment

    if dry_run:
        experiment.check_files(chosen)
        click.echo(dump(chosen), nl=False)
        return
    experiment.run(chosen, announce=announce)


@click.command(context_settings=OVERRIDABLE)
@words_argument("FOLDER|EXPERIMENT.yaml [KEY=VALUE]...")
def evaluate(words: Sequence[str]) -> None:
    """Measure what is there: a saved drafter (folder or name), a run's folder, or a YAML."""
    name, overrides = first_and_rest(words, "a saved drafter, a run or a YAML")
    what = Path(name)
    components = load_components()
    if what.is_dir() or components.knows("saved_drafter", name):
        chosen = saved_experiment(name, overrides)
    elif not what.exists():
        known = components.names("saved_drafter")
        meant = did_you_mean(name, known) if known else ""
        raise FalconLabError(
            f"{what}: no such file or folder; name a saved drafter, a run or a YAML{meant}"
        )
    elif is_short_form(what, overrides):
        raise FalconLabError(f"{what}: has variants or seeds: falcon-lab compare {what}")
    else:
        chosen = load_experiment(what, ["stages=[evaluate, report]", *overrides])
    from falcon_lab import experiment

    experiment.run(chosen, announce=announce)


@click.command(context_settings=OVERRIDABLE)
@words_argument("COMPARISON.yaml|RUN... [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print what would be trained and measured, and stop.")
def compare(words: Sequence[str], dry_run: bool) -> None:
    """Train and measure drafter heads on equal terms: a YAML with heads, or runs that are there.

    Every head is trained once a seed, as an ordinary run; then all drafters answer the same prompts
    in one process, in turns, at equal node budgets. The same command resumes it.
    """
    first, rest = first_and_rest(words, "a comparison's YAML, or runs")
    if is_yaml(first):
        plan = load_plan(Path(first), rest)
    else:
        runs = [Path(word) for word in words if "=" not in word and not is_yaml(word)]
        plan = plan_of_runs(runs, [word for word in words if "=" in word or is_yaml(word)])
    carry_out(plan, dry_run=dry_run)


def carry_out(plan: Plan, *, dry_run: bool) -> None:
    """Train what is missing, measure, and write the results and the report; or describe it."""
    from falcon_lab import experiment

    if dry_run:
        experiment.check_files(plan.base)
        click.echo(describe(plan))
        return
    for name, why in plan.left_out.items():
        announce(f"left out: {name} ({why})")

    from falcon_lab.measure.results import replace_results
    from falcon_lab.studies.compare.report import format_comparison, write_page
    from falcon_lab.studies.compare.stage import compare as measure

    train, check = (partial(do, announce=announce) for do in (experiment.run, experiment.check))
    results = measure(plan, announce, train, check)
    page = plan.folder / f"{plan.base.name}.html"
    path = page.with_name(f"{plan.base.name}.json")
    into = replace_results(path, results, [page], announce=announce)
    click.echo(format_comparison(results))
    report = write_page(page, results)
    click.echo(f"\nreport   {report}\nresults  {into}")


@click.command("view-data", context_settings=OVERRIDABLE)
@words_argument("EXPERIMENT.yaml|CORPUS [KEY=VALUE]...")
@click.option("--samples", type=COUNT, default=1, show_default=True, help="Documents to show.")
@no_color_option(help="Mark the loss with [[ ]] in place of colour.")
def view_data(words: Sequence[str], samples: int, no_color: bool) -> None:
    """Show samples of an experiment's data or of a corpus, tokens in the loss coloured."""
    what, overrides = first_and_rest(words, "an experiment's YAML or a corpus")
    if is_yaml(what):
        experiment = load_experiment(what, overrides)
    else:
        named = plain_overrides({"data.corpus": what}, "the command line")
        experiment = load_experiment(None, [*named, *overrides])

    from falcon_lab.data.corpora import corpus
    from falcon_lab.data.documents import load_template
    from falcon_lab.data.encoding import spans
    from falcon_lab.pretraining.target import ensure_target

    config, color = experiment.data, wants_color(no_color)
    target = ensure_target(experiment.target, progress)
    documents = corpus(config.corpus, split="train", limit=samples, seed=config.seed)
    template = load_template(config.chat_template)
    for document in islice(documents, samples):
        progress(f"— {document.id} ({document.source})")
        for text, in_loss in spans(document, target.tokenizer, template):
            click.echo(mark(text, color=color) if in_loss else text, nl=False, color=color)
        click.echo()


def mark(text: str, *, color: bool) -> str:
    """Return text in the loss: green, or in double brackets."""
    return click.style(text, fg="green") if color else f"[[{text}]]"
