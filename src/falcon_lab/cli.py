"""The command line: ``falcon-lab`` and ``python -m falcon_lab``.

Arguments are checked here, before anything heavy is imported; what a command does stands in
``falcon_lab.commands``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from falcon_lab import __version__
from falcon_lab.commands.quiet import third_party_tips_silenced
from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.scaffolding.plugin import KINDS as PLUGIN_KINDS
from falcon_lab.scaffolding.plugin import write_plugin
from falcon_lab.studies.bench import HF_ASSISTED, METHODS

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
"""What a shell gives a command that Ctrl-C ended."""


class MendableError(click.ClickException):
    """A ``FalconLabError`` on its way out: one line, exit code 2."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message on stderr."""
        click.echo(f"falcon-lab: {self.format_message()}", err=True)


class Commands(click.Group):
    """Turns what the user can mend, and Ctrl-C, into a line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except FalconLabError as error:
            raise MendableError(" ".join(str(error).split())) from error
        except KeyboardInterrupt:
            interrupted(ctx)
        except SystemExit as leaving:
            # Lightning's Trainer catches Ctrl-C itself and leaves with 1.
            if isinstance(leaving.__context__, KeyboardInterrupt):
                interrupted(ctx)
            raise


def interrupted(ctx: click.Context) -> None:
    """Say how to go on after Ctrl-C, and leave with the shell's code for it."""
    again = "; the same command goes on where it stopped"
    resumable = ctx.invoked_subcommand in ("run", "compare")
    click.echo(f"\nfalcon-lab: interrupted{again if resumable else ''}", err=True)
    ctx.exit(INTERRUPTED)


PASS_OVERRIDES = {"ignore_unknown_options": True}
"""``--tree.depth=6`` is an override, not an option."""

FILE = click.Path(dir_okay=False, path_type=Path)

overrides_argument = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]..."
)


def words_argument(metavar: str) -> Callable[[F], F]:
    """One thing and its overrides, which may stand before it too; see ``first_and_rest``."""
    return click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar=metavar)


def counts(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """``1,4,8`` as numbers of at least one, in their order, each once."""
    words = text.split(",") if text else []
    try:
        found = sorted({int(word) for word in words})
    except ValueError:
        found = [0]
    if found and found[0] < 1:
        raise FalconLabError(f"{option.opts[0]} takes numbers of at least 1, as in 1,4,8: {text}")
    return tuple(found)


def first_and_rest(words: Sequence[str], what: str) -> tuple[str, list[str]]:
    """The first word that is no ``--key=value``, and all the others in order."""
    for index, word in enumerate(words):
        if not word.startswith("-"):
            return word, [*words[:index], *words[index + 1 :]]
    raise FalconLabError(f"name {what}; --help shows how")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="falcon-lab")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train speculative-decoding drafters and measure them honestly."""
    ctx.with_resource(third_party_tips_silenced())
    ctx.with_resource(warnings.catch_warnings())
    warnings.simplefilter("once", PluginWarning)
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning):  # a line for the user, no line of our source
            click.echo(f"falcon-lab: warning: {message}", err=True)
        else:
            others(message, category, *place, **more)

    warnings.showwarning = show


@main.command(context_settings=PASS_OVERRIDES)
@words_argument("EXPERIMENT.yaml [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print the resolved experiment and stop.")
def run(words: Sequence[str], dry_run: bool) -> None:
    """Train and measure what the YAML says. Overrides: tree.depth=6, or --tree.depth=6."""
    from falcon_lab.config.load import dump, load_experiment, variants

    experiment, overrides = first_and_rest(words, "an experiment's YAML")
    everything = variants(experiment, overrides)
    if dry_run:
        click.echo(dump(load_experiment(experiment, overrides)), nl=False)
        return
    from falcon_lab.commands.run import run_all

    run_all(everything, announce)


@main.command(context_settings=PASS_OVERRIDES)
@words_argument("FOLDER|EXPERIMENT.yaml [KEY=VALUE]...")
def evaluate(words: Sequence[str]) -> None:
    """Measure what is there: a saved drafter's folder, a run's folder, or an experiment's YAML."""
    name, overrides = first_and_rest(words, "a saved drafter, a run or a YAML")
    what = Path(name)
    if not what.exists():
        raise FalconLabError(
            f"{what}: no such file or folder; name a saved drafter, a run or a YAML"
        )
    if what.is_dir():
        from falcon_lab.commands.run import evaluate_folder

        evaluate_folder(what, overrides, announce)
        return
    from falcon_lab.config.load import variants

    everything = variants(what, ["stages=[evaluate, report]", *overrides])
    from falcon_lab.commands.run import run_all

    run_all(everything, announce)


@main.command(context_settings=PASS_OVERRIDES)
@words_argument("COMPARISON.yaml|RUN... [KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print what would be trained and measured, and stop.")
def compare(words: Sequence[str], dry_run: bool) -> None:
    """Train and measure drafter heads on equal terms: a YAML with heads, or runs that are there.

    Every head is trained once a seed, as an ordinary run; then all drafters answer the same prompts
    in one process, in turns, at equal node budgets. The same command goes on where it stopped.
    """
    from falcon_lab.config.overrides import is_yaml
    from falcon_lab.studies.compare.given import plan_of_runs
    from falcon_lab.studies.compare.loading import load_plan
    from falcon_lab.studies.compare.plan import describe

    first, _ = first_and_rest(words, "a comparison's YAML, or runs")
    if is_yaml(first):
        plan = load_plan(Path(first), first_and_rest(words, "")[1])
    else:
        runs = [Path(word) for word in words if "=" not in word and not is_yaml(word)]
        others = [word for word in words if "=" in word or is_yaml(word)]
        plan = plan_of_runs(runs, others)
    if dry_run:
        click.echo(describe(plan))
        return
    for name, why in plan.left_out.items():
        announce(f"left out: {name} ({why})")
    from falcon_lab.commands.run import compare_heads

    compare_heads(plan, announce)


def engine_options(command: F) -> F:
    """Options that name a target, a drafter and a tree; the rest are overrides."""
    for decorator in (
        overrides_argument,
        click.option(
            "--drafter", type=click.Path(path_type=Path), help="A saved drafter's folder."
        ),
        click.option("--target", help="A built-in target, a hub id or a folder."),
        click.option("--tree", help="A tree builder's name; its options as tree.depth=6."),
        click.option("--temperature", type=float, help="0 is greedy."),
        click.option("--max-new-tokens", type=int),
        click.option("--seed", type=int),
    ):
        command = decorator(command)
    return command


def engine_overrides(options: dict[str, Any]) -> list[str]:
    """``engine_options`` in the words of a configuration, where they are checked."""
    keys = {
        "target": "target.name",
        "tree": "tree.name",
        "temperature": "evaluation.temperature",
        "max_new_tokens": "evaluation.max_new_tokens",
        "seed": "evaluation.seed",
    }
    given = [f"{k}={options[name]}" for name, k in keys.items() if options.get(name) is not None]
    return [*given, *options["overrides"]]


@main.command(context_settings=PASS_OVERRIDES)
@engine_options
@click.option("--prompt", help="The text to go on from; read from stdin when left out.")
@click.option("--no-color", is_flag=True, help="Do not colour accepted draft tokens.")
def generate(drafter: Path | None, prompt: str | None, no_color: bool, **options: Any) -> None:
    """Continue a prompt as it is decoded, accepted draft tokens coloured, speed and τ at the end.

    Without --drafter, decode plainly, or with the training-free drafter of drafter.name=NAME.
    Other options are overrides of a configuration, such as tree.depth=6 or evaluation.top_p=0.9.
    """
    from falcon_lab.config.saved import decoding_experiment

    experiment = decoding_experiment(drafter, engine_overrides(options))
    text = prompt if prompt is not None else sys.stdin.read()
    if not text.strip():
        raise FalconLabError("the prompt is empty; give --prompt TEXT or pipe one in")
    from falcon_lab.commands.generate import generate_text

    generate_text(experiment, drafter, text, options["overrides"], color=wants_color(no_color))


@main.command(context_settings=PASS_OVERRIDES)
@engine_options
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True)
@click.option(
    "--samples", type=click.IntRange(20), default=200, show_default=True, help="For each prompt."
)
def check(drafter: Path | None, prompts: int, samples: int, **options: Any) -> None:
    """Test whether a drafter is lossless on this target with this tree and rule; exit 1 if not.

    Greedy: the same tokens as plain decoding, prompt by prompt. Sampled: total variation from the
    target's own continuations, beside the noise floor that two runs of the target have.
    """
    from falcon_lab.config.saved import decoding_experiment

    experiment = decoding_experiment(drafter, engine_overrides(options))
    from falcon_lab.commands.check import is_lossless

    lossless = is_lossless(
        experiment, drafter, options["overrides"], prompts=prompts, samples=samples
    )
    click.get_current_context().exit(0 if lossless else 1)


@main.command(context_settings=PASS_OVERRIDES)
@overrides_argument
@click.option("--drafter", type=click.Path(path_type=Path), help="A saved drafter's folder.")
@click.option("--target", help="A built-in target, a hub id or a folder.")
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
@click.option("--max-new-tokens", type=int)
@click.option("--seed", type=int)
@click.option("--profile", type=FILE, help="Write a Chrome trace of our loops.")
@click.option(
    "--batch-sizes",
    callback=counts,
    help="1,4,8: measure throughput with so many prompts at a time instead, in our loops alone.",
)
@click.option("--json", "into", type=FILE, help="Write the results.")
def bench(
    drafter: Path | None,
    trees: tuple[str, ...],
    methods: tuple[str, ...],
    assistant: str | None,
    profile: Path | None,
    batch_sizes: tuple[int, ...],
    into: Path | None,
    **options: Any,
) -> None:
    """Measure decoding against Hugging Face's ways, and the target's pass against the machine.

    Every method answers every prompt, in turns. Other arguments are overrides of a configuration,
    such as target.lean=true or evaluation.threads=1; a row of evaluation.methods is measured too.
    """
    from falcon_lab.config.saved import bench_experiment

    experiment = bench_experiment(drafter, trees, engine_overrides(options))
    wanted = set(methods or METHODS)
    if HF_ASSISTED in methods and assistant is None:
        raise FalconLabError(f"--method {HF_ASSISTED} needs --assistant MODEL")
    from falcon_lab.commands.bench import batches
    from falcon_lab.commands.bench import bench as measure

    progress = partial(click.echo, err=True)
    if batch_sizes:
        if methods or assistant or profile:
            raise FalconLabError(
                "--batch-sizes measures our own loops alone; leave out --method, --assistant and "
                "--profile"
            )
        batches(experiment, batch_sizes, progress, into=into)
        return
    measure(experiment, wanted, progress, assistant=assistant, trace=profile, into=into)


@main.command(context_settings=PASS_OVERRIDES)
@words_argument("DRAFTER [KEY=VALUE]...")
@click.option("--target", help="A built-in target, a hub id or a folder.")
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
@click.option("--texts", type=click.IntRange(2), default=48, show_default=True, help="Of them.")
@click.option(
    "--nodes", type=click.IntRange(1), default=64, show_default=True, help="The largest tree."
)
@click.option(
    "--depth", type=click.IntRange(1), default=12, show_default=True, help="The longest path."
)
@click.option("--max-new-tokens", type=int)
@click.option("--seed", type=int)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tuned"),
    show_default=True,
    help="Folder for tuned.yaml, tune.json and plots.",
)
def tune(
    words: Sequence[str],
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
    from falcon_lab.config.saved import bench_experiment, read_json

    name, overrides = first_and_rest(words, "a saved drafter's folder")
    drafter = Path(name)
    saved = read_json(drafter / "config.json")
    from falcon_lab.studies.tune.choosing import shipped_trees

    rows = trees or shipped_trees(int(saved.get("drafter", {}).get("block", 1)))
    experiment = bench_experiment(
        drafter, rows, engine_overrides({**options, "overrides": overrides})
    )
    from falcon_lab.commands.tune import tune_tree
    from falcon_lab.studies.tune.stage import Limits

    tune_tree(experiment, Limits(texts, source, nodes, depth), into, partial(click.echo, err=True))


@main.command()
@click.option("--strict", is_flag=True, help="Exit with 1 when a plug-in did not load.")
@click.pass_context
def plugins(ctx: click.Context, strict: bool) -> None:
    """List every component with its options, and what did not load, as JSON."""
    from dataclasses import asdict

    from falcon_lab.plugins.discovery import load_components

    components = load_components()
    failures = [asdict(failure) for failure in components.failures]
    listing = {"components": components.listing(), "failures": failures}
    click.echo(json.dumps(listing, indent=2, default=str))
    ctx.exit(1 if strict and failures else 0)


@main.command("new-plugin")
@click.argument("name")
@click.option("--kind", type=click.Choice(list(PLUGIN_KINDS)), default="drafter", show_default=True)
@click.option(
    "--into", type=click.Path(file_okay=False, path_type=Path), default=Path(), help="Folder."
)
def new_plugin(name: str, kind: str, into: Path) -> None:
    """Write a distribution with a component that works, to begin your own from.

    It can be installed as it is, passes its own test, and is listed by falcon-lab plugins.
    """
    from falcon_lab.plugins.discovery import load_components

    folder = write_plugin(name, kind, into, load_components())
    click.echo(f"wrote {folder}; next: pip install -e {folder} && python -m pytest {folder}/tests")


@main.command()
def doctor() -> None:
    """Say what is installed, what it can use, and what to mend."""
    from falcon_lab.commands.doctor import examine

    for finding in examine():
        click.echo(str(finding))


@main.command("view-data", context_settings=PASS_OVERRIDES)
@words_argument("EXPERIMENT.yaml|CORPUS [KEY=VALUE]...")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True)
@click.option("--no-color", is_flag=True, help="Mark the loss with [[ ]] in place of colour.")
def view_data(words: Sequence[str], samples: int, no_color: bool) -> None:
    """Show samples of an experiment's data or of a corpus, tokens in the loss coloured."""
    from falcon_lab.config.load import load_experiment

    what, overrides = first_and_rest(words, "an experiment's YAML or a corpus")
    is_yaml = what.endswith((".yaml", ".yml"))
    own = overrides if is_yaml else [f"data.corpus={what}", *overrides]
    experiment = load_experiment(what if is_yaml else None, own)
    from falcon_lab.commands.run import show_samples

    show_samples(experiment, samples, color=wants_color(no_color))


def wants_color(refused: bool) -> bool:
    """Whether to colour: not on request, in a pipe, or where NO_COLOR says so."""
    return not refused and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def announce(line: str) -> None:
    """Tell the user; only the first process of a distributed run speaks."""
    if os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("RANK", "0") == "0":
        click.echo(line)
