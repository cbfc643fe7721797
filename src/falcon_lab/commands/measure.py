"""``bench`` and ``tune``: how fast decoding is on this machine, and the tree that suits it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from falcon_lab.commands.arguments import (
    FILE,
    FOLDER,
    MOST,
    OVERRIDABLE,
    counts,
    drafter_option,
    first_and_rest,
    overrides_argument,
    overrides_of,
    progress,
    settings,
    words_argument,
)
from falcon_lab.config.saved import (
    bench_experiment,
    decoding_experiment,
    opened_drafter,
    read_description,
)
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.builtins import LONGEST_PATH, MOST_NODES
from falcon_lab.studies.bench import HF_ASSISTED, METHODS

TUNED_YAML, TUNED_JSON = "tuned.yaml", "tune.json"


@click.command(context_settings=OVERRIDABLE)
@drafter_option
@click.option(
    "--tree", "trees", multiple=True, help="NAME or NAME,depth=6; as often as there are trees."
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice(list(METHODS)),
    help="Measure this beside plain decoding; all when left out.",
)
@click.option("--assistant", help="A smaller model for Hugging Face's assisted generation.")
@settings("target", "max_new_tokens", "seed")
@click.option("--profile", type=FILE, help="Write a Chrome trace of our loops.")
@click.option(
    "--batch-sizes",
    callback=counts,
    help="1,4,8: measure throughput with so many prompts at a time instead, in our loops alone.",
)
@click.option("--json", "into", type=FILE, help="Write the results.")
@overrides_argument
def bench(
    drafter: str | None,
    trees: tuple[str, ...],
    methods: tuple[str, ...],
    assistant: str | None,
    profile: Path | None,
    batch_sizes: tuple[int, ...],
    into: Path | None,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure decoding against Hugging Face's ways, and the target's pass against the machine.

    Every method answers every prompt, in turns. Other arguments are overrides of a configuration,
    such as target.lean=true or evaluation.threads=1; a row of evaluation.methods is measured too.
    """
    experiment = bench_experiment(drafter, trees, overrides_of(options, overrides))
    if HF_ASSISTED in methods and assistant is None:
        raise FalconLabError(f"--method {HF_ASSISTED} needs --assistant MODEL")
    if batch_sizes and (methods or assistant or profile):
        raise FalconLabError(
            "--batch-sizes measures our own loops alone; leave out --method, --assistant and "
            "--profile"
        )

    from falcon_lab.measure.results import refuse_foreign, replace_results
    from falcon_lab.studies.bench.batches import bench_batches
    from falcon_lab.studies.bench.decoding import bench_decoding
    from falcon_lab.studies.bench.report import format_batches, format_bench
    from falcon_lab.studies.bench.tracing import refuse_other_than_a_trace

    if into is not None:
        refuse_foreign(into)
    if profile is not None:
        refuse_other_than_a_trace(profile)
    if batch_sizes:
        results = bench_batches(experiment, batch_sizes, announce=progress)
        shown = format_batches(results)
    else:
        results = bench_decoding(
            experiment,
            set(methods or METHODS),
            assistant=assistant,
            trace=profile,
            announce=progress,
        )
        shown = format_bench(results)
    if into is not None:
        replace_results(into, results, announce=progress)
    click.echo(shown)


@click.command(context_settings=OVERRIDABLE)
@words_argument("DRAFTER [KEY=VALUE]...")
@click.option(
    "--tree",
    "trees",
    multiple=True,
    help="Compare with this: NAME, NAME,depth=6 or a YAML; all that ship when left out.",
)
@click.option(
    "--prompts",
    "source",
    default="validation",
    show_default=True,
    help="What to tune on: a set or a JSONL file, as evaluation.prompts.name.",
)
@click.option(
    "--texts", type=click.IntRange(2, MOST), default=48, show_default=True, help="Of them."
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MOST_NODES),
    default=64,
    show_default=True,
    help="The largest tree.",
)
@click.option(
    "--depth",
    type=click.IntRange(1, LONGEST_PATH),
    default=12,
    show_default=True,
    help="The longest path.",
)
@settings("target", "max_new_tokens", "seed")
@click.option(
    "--into",
    type=FOLDER,
    default=Path("tuned"),
    show_default=True,
    help="Folder for tuned.yaml, tune.json and plots.",
)
def tune(
    words: tuple[str, ...],
    trees: tuple[str, ...],
    source: str,
    texts: int,
    nodes: int,
    depth: int,
    into: Path,
    **options: Any,
) -> None:
    """Find the tree that makes a drafter fastest on this machine, and measure it beside others.

    Measures what rounds cost, looks where the drafter is right on prompts that are not those of the
    measurement, and builds the static tree and the confidence with the most expected tokens a
    second. tuned.yaml is then an override: lightning run experiments/csgd.yaml tuned.yaml. Other
    arguments are overrides too, such as target.lean=true or evaluation.threads=1.
    """
    drafter, overrides = first_and_rest(words, "a saved drafter's folder or name")
    with opened_drafter(drafter) as folder:
        block = read_description(folder)["drafter"].get("block")
    decoding_experiment(drafter, overrides_of(options, overrides))  # a typo is found before torch

    from falcon_lab.studies.tune.choosing import shipped_trees

    rows = trees or shipped_trees(block if isinstance(block, int) else 1)
    experiment = bench_experiment(drafter, rows, overrides_of(options, overrides))

    from falcon_lab.measure.results import replace_results
    from falcon_lab.studies.tune.report import (
        PLOTS,
        format_tune,
        refuse_foreign_files,
        write_fragment,
        write_plots,
    )
    from falcon_lab.studies.tune.stage import Limits
    from falcon_lab.studies.tune.stage import tune as tune_tree

    tables, tree = into / TUNED_JSON, into / TUNED_YAML
    refuse_foreign_files(tables, tree)
    results = tune_tree(experiment, Limits(texts, source, nodes, depth), progress)
    made = [tree, *(into / f"{name}.svg" for name in PLOTS)]
    replace_results(tables, results, made, announce=progress)
    click.echo(format_tune(results))
    write_plots(into, results)
    click.echo(f"\nthe tree: {write_fragment(tree, results)}; tables and answers: {tables}")
