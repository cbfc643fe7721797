"""``generate`` and ``check``: one prompt decoded before one's eyes, and a test of losslessness."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from falcon_lab.commands.arguments import (
    COUNT,
    MOST,
    OVERRIDABLE,
    drafter_option,
    no_color_option,
    overrides_argument,
    overrides_of,
    progress,
    settings,
    wants_color,
)
from falcon_lab.config.saved import decoding_experiment, method_of, names_a_drafter
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_text

if TYPE_CHECKING:
    from falcon_lab.decoding.generation import Generation
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.interfaces import Acceptance
    from falcon_lab.measure.engines import Setup
    from falcon_lab.tree import TokenTree

engine_settings = settings("target", "tree", "temperature", "max_new_tokens", "seed")

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a character of which some bytes are still to come."""


class Stream:
    """Write tokens as text, as soon as they are whole characters.

    Attributes:
        seconds: time spent here, which is not decoding's.
    """

    def __init__(self, stop: StopCondition, *, color: bool) -> None:
        self.seconds = 0.0
        self._stop, self._color = stop, color
        self._tokens: list[int] = []
        self._written = 0

    def on_round(
        self, tokens: list[int], drafted: int, tree: TokenTree | None, accepted: Acceptance | None
    ) -> None:
        """Write a round's tokens: first the ``drafted`` ones, then the target's own."""
        from falcon_lab.timing import Stopwatch

        with Stopwatch() as watch:
            self._write(tokens[:drafted], drafted=True)
            self._write(tokens[drafted:], drafted=False)
            sys.stdout.flush()
        self.seconds += watch.wall

    def finish(self) -> None:
        """Write what was buffered, and end the line."""
        text = self._stop.text(self._tokens)
        click.echo(text[self._written :])

    def _write(self, tokens: list[int], *, drafted: bool) -> None:
        self._tokens += tokens
        text = self._stop.text(self._tokens)
        new = text[self._written :]
        if not tokens or not new or new.endswith(UNFINISHED):
            return
        self._written = len(text)
        styled = click.style(new, fg="green") if drafted and self._color else new
        click.echo(styled, nl=False, color=self._color)


@click.command(context_settings=OVERRIDABLE)
@engine_settings
@drafter_option
@click.option("--prompt", help="The text to continue; read from stdin when left out.")
@no_color_option(help="Do not colour accepted draft tokens.")
@overrides_argument
def generate(
    drafter: str | None,
    prompt: str | None,
    no_color: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Continue a prompt as it is decoded, accepted draft tokens coloured, speed and τ at the end.

    Without --drafter, decode plainly, or with the training-free drafter of drafter.name=NAME.
    Other options are overrides of a configuration, such as tree.depth=6 or evaluation.top_p=0.9.
    """
    experiment = decoding_experiment(drafter, overrides_of(options, overrides))
    text = check_text(prompt, "--prompt") if prompt is not None else prompt_from_stdin()
    if not text.strip():
        raise FalconLabError("the prompt is empty; give --prompt TEXT or pipe one in")

    from falcon_lab.timing import Stopwatch

    experiment.evaluation.prompts.texts = [text]
    choose_method(experiment, drafter, overrides)
    setup = load(experiment)
    engine = setup.methods().engines.get(DRAFTER) or setup.plain()
    [encoded] = setup.prompts()
    stream = Stream(setup.stop, color=wants_color(no_color))
    with Stopwatch(setup.target.device) as watch:
        generation = setup.answer(engine, encoded, on_round=stream.on_round)
    stream.finish()
    progress(summary(generation, watch.wall - stream.seconds))
    if not engine.lossless:
        progress("the acceptance rule is lossy: this is not the target's own text")


def prompt_from_stdin() -> str:
    """Return all that stdin has, and say at a terminal that it is waited for.

    Raises:
        FalconLabError: it is no text.
    """
    if sys.stdin.isatty():
        progress("reading the prompt from the terminal; end it with Ctrl-D")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise FalconLabError(
            f"standard input: byte {error.start + 1} of the prompt is no {error.encoding}; send "
            "text as UTF-8"
        ) from error
    return check_text(text, "standard input")


def summary(generation: Generation, seconds: float) -> str:
    """Return speed and τ in a line: all tokens over all seconds, those of the prompt too."""
    tokens, rounds = len(generation.tokens), generation.rounds
    line = f"[{tokens} tokens in {seconds:.3g} s ({generation.seconds.prefill:.3g} s of prefill): "
    line += f"{tokens / max(seconds, 1e-9):.1f} tokens/s, ended by {generation.finish}"
    if any(each.nodes for each in rounds):
        emitted = sum(each.emitted for each in rounds) / len(rounds)
        accepted = sum(each.accepted for each in rounds) / len(rounds)
        line += f", τ {emitted:.2f} with the bonus token, {accepted:.2f} without"
    return line + "]"


@click.command(context_settings=OVERRIDABLE)
@engine_settings
@drafter_option
@click.option("--prompts", type=COUNT, default=8, show_default=True, help="To check on.")
@click.option(
    "--samples",
    type=click.IntRange(20, MOST),
    default=200,
    show_default=True,
    help="For each prompt.",
)
@overrides_argument
def check(
    drafter: str | None, prompts: int, samples: int, overrides: tuple[str, ...], **options: Any
) -> None:
    """Test whether a drafter is lossless on this target with this tree and rule; exit 1 if not.

    Greedy: the same tokens as plain decoding, prompt by prompt; in bfloat16 and float16 texts may
    part where two tokens are nearer to each other than rounding moves them. Sampled: total
    variation from the target's own continuations, beside the noise floor that two runs of the
    target have.
    """
    experiment = decoding_experiment(drafter, overrides_of(options, overrides))

    from falcon_lab.decoding.losslessness import greedy_equality, sampled_distance
    from falcon_lab.decoding.rounding import EXACT

    config = experiment.evaluation
    config.prompts.limit = prompts
    choose_method(experiment, drafter, overrides)
    if not config.methods:
        raise FalconLabError("name the drafter to check: --drafter DIR or drafter.name=NAME")
    sampled_at = config.temperature or 1.0
    setup = load(experiment, temperatures=(0.0, sampled_at))
    engine, plain, target = setup.methods().engines[DRAFTER], setup.plain(), setup.target
    tokens = [prompt.tokens([]) for prompt in setup.prompts()]
    stop, sampling = setup.stop, setup.sampling
    greedy = greedy_equality(plain, engine, tokens, max_new_tokens=config.max_new_tokens, stop=stop)
    click.echo(greedy.verdict)
    if not greedy.passed and target.dtype not in EXACT:
        click.echo(f"rounding in {target.dtype} does not explain that; see target.dtype=float32")
    sampled = sampled_distance(
        plain,
        engine,
        tokens,
        sampling=replace(sampling, temperature=sampled_at),
        stop=stop,
        samples=samples,
        seed=config.seed,
    )
    click.echo(sampled.verdict)
    if not engine.lossless:
        name = experiment.acceptance["name"]
        click.echo(f"NOT lossless: acceptance rule {name!r} is lossy by its own word")
    lossless = engine.lossless and greedy.passed and sampled.passed
    click.get_current_context().exit(0 if lossless else 1)


def load(experiment: Experiment, temperatures: Sequence[float] | None = None) -> Setup:
    """Load the experiment's target, trained first where it is built in; all is checked before.

    Args:
        experiment: with the methods that are used.
        temperatures: at which they decode; None: the experiment's.
    """
    from falcon_lab.measure.engines import Setup
    from falcon_lab.plugins.discovery import load_components

    check = partial(Setup.check, temperatures=temperatures)
    return Setup.load(experiment, load_components(), progress, check)


DRAFTER = "the drafter"
"""The only method of an experiment that decodes with a drafter."""


def choose_method(experiment: Experiment, drafter: str | None, overrides: Sequence[str]) -> None:
    """Leave the method of the saved drafter, or of the one that the overrides name, or none."""
    experiment.evaluation.methods = {}
    if drafter is not None or names_a_drafter(overrides):
        experiment.evaluation.methods[DRAFTER] = method_of(experiment, drafter)
