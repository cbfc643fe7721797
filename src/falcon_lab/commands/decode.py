"""``generate`` and ``check``: text decoded before one's eyes, and a test of losslessness."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
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
    quick_defaults,
    settings,
    wants_color,
)
from falcon_lab.commands.chat import LONGEST_ANSWER, Chat, talk
from falcon_lab.commands.streams import stdin_text
from falcon_lab.config.overrides import parse_overrides
from falcon_lab.config.saved import decoding_experiment, method_of, names_a_drafter
from falcon_lab.config.schema import Experiment
from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_text

if TYPE_CHECKING:
    from falcon_lab.measure.engines import Setup

engine_settings = settings("target", "tree", "temperature", "max_new_tokens", "seed")


@click.command(context_settings=OVERRIDABLE)
@engine_settings
@drafter_option
@click.option("--prompt", help="The text to continue, or the first turn of a chat.")
@click.option("--chat", "chats", is_flag=True, help="Chat, a turn a line, with what was said.")
@click.option("--system", help="The system message, where the target's chat template has one.")
@no_color_option(help="Do not colour accepted draft tokens.")
@overrides_argument
def generate(
    drafter: str | None,
    prompt: str | None,
    chats: bool,
    system: str | None,
    no_color: bool,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Continue a prompt, or chat, accepted draft tokens coloured, with speed and τ below.

    Without --drafter, decode plainly, or with the training-free drafter of drafter.name=NAME.
    Without --prompt, a terminal gets a chat where the target has a chat template; else all of stdin
    is the prompt. Other options are overrides of a configuration, such as tree.depth=6 or
    evaluation.top_p=0.9.
    """
    given = overrides_of(options, overrides)
    experiment = decoding_experiment(drafter, given, quick_defaults("generate"))
    text = None if prompt is None else some_text(prompt, "--prompt")
    if text is None and not chats and not sys.stdin.isatty():
        text = some_text(stdin_text(sys.stdin.read), "standard input")
    if system is not None:
        check_text(system, "--system")

    from falcon_lab.commands.answering import Answering
    from falcon_lab.measure.conversation import conversation, has_chat_template

    experiment.evaluation.prompts.texts = [text or GREETING]
    choose_method(experiment, drafter, overrides)
    option = "--chat" if chats else "" if system is None else "--system"
    setup = load(experiment, check=partial(check_ahead, needs_template=option))
    target = setup.target
    answering = Answering(setup, color=wants_color(no_color))
    if not answering.lossless:
        progress("the acceptance rule is lossy: this is not the target's own text")
    if chats or (text is None and has_chat_template(target.tokenizer)):
        if not says_length(given):
            experiment.evaluation.max_new_tokens = LONGEST_ANSWER
        beginning = conversation(target, system)
        talk(Chat(answering, beginning, experiment.evaluation.max_new_tokens), text)
        return
    if text is None:
        progress("reading the prompt from the terminal; end it with Ctrl-D")
        text = some_text(stdin_text(sys.stdin.read), "standard input")
    answering.answer(conversation(target, system, text))


GREETING = "Hello"
"""Stands for what is not asked yet, where a stand-in of the target is tried."""


def some_text(text: str, where: str) -> str:
    """Return a text that can be encoded and is not empty.

    Raises:
        FalconLabError: it is neither.
    """
    if not check_text(text, where).strip():
        raise FalconLabError("the prompt is empty; give --prompt TEXT or pipe one in")
    return text


def says_length(given: Sequence[str]) -> bool:
    """Return whether overrides say how many tokens an answer may have."""
    section, _, key = LENGTH.partition(".")
    return any(
        one.key == LENGTH
        or (one.key == section and isinstance(one.value, Mapping) and key in one.value)
        for one in parse_overrides(given)
    )


LENGTH = "evaluation.max_new_tokens"


def check_ahead(setup: Setup, needs_template: str) -> None:
    """Check what is to come where the target must be trained first; else that comes at once.

    Args:
        setup: with the target or its stand-in.
        needs_template: the option that needs a chat template; "" where none does.

    Raises:
        FalconLabError: there is no template, or as ``Setup.check``.
    """
    from falcon_lab.measure.conversation import has_chat_template

    if needs_template and not has_chat_template(setup.target.tokenizer):
        raise FalconLabError(
            f"{needs_template}: {setup.target.name} has no chat template; leave {needs_template} "
            "out, or take a target that is made to answer"
        )
    if setup.stands_in:
        setup.check()


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

    from falcon_lab.config.schema import dtype_name
    from falcon_lab.decoding.losslessness import greedy_equality, sampled_distance
    from falcon_lab.decoding.rounding import EXACT
    from falcon_lab.pretraining.tuned import tuning_sentence

    config = experiment.evaluation
    config.prompts.limit = prompts
    choose_method(experiment, drafter, overrides)
    if not config.methods:
        raise FalconLabError("name the drafter to check: --drafter DIR or drafter.name=NAME")
    sampled_at = config.temperature or 1.0
    setup = load(experiment, check=lambda setup: setup.check(temperatures=(0.0, sampled_at)))
    engine, plain, target = setup.methods().engines[DRAFTER], setup.plain(), setup.target
    tokens = [prompt.tokens([]) for prompt in setup.prompts()]
    stop, sampling = setup.stop, setup.sampling
    greedy = greedy_equality(plain, engine, tokens, max_new_tokens=config.max_new_tokens, stop=stop)
    click.echo(greedy.verdict)
    if not greedy.passed and target.dtype not in EXACT:
        dtype = dtype_name(target.dtype)
        click.echo(f"rounding in {dtype} does not explain that; see target.dtype=float32")
    sampled = sampled_distance(
        plain,
        engine,
        tokens,
        sampling=replace(sampling, temperature=sampled_at),
        stop=stop,
        samples=samples,
        seed=config.seed,
        side_by_side=SIDE_BY_SIDE,
    )
    click.echo(sampled.verdict)
    if target.tuning is not None:
        click.echo(f"compared with the tuned target's own output: {tuning_sentence(target.tuning)}")
    if not engine.lossless:
        name = experiment.acceptance["name"]
        click.echo(f"NOT lossless: acceptance rule {name!r} is lossy by its own word")
    lossless = engine.lossless and greedy.passed and sampled.passed
    click.get_current_context().exit(0 if lossless else 1)


SIDE_BY_SIDE = 16
"""Plain samples of a prompt that share the target's passes."""


def load(experiment: Experiment, check: Callable[[Setup], object]) -> Setup:
    """Load the experiment's target, trained first where it is built in.

    Args:
        experiment: with the methods that are used.
        check: of what is to come, before anything is trained.
    """
    from falcon_lab.measure.engines import Setup
    from falcon_lab.plugins.discovery import load_components

    return Setup.load(experiment, load_components(), progress, check)


DRAFTER = "the drafter"
"""The only method of an experiment that decodes with a drafter."""


def choose_method(experiment: Experiment, drafter: str | None, overrides: Sequence[str]) -> None:
    """Leave the method of the saved drafter, or of the one that the overrides name, or none."""
    experiment.evaluation.methods = {}
    if drafter is not None or names_a_drafter(overrides):
        experiment.evaluation.methods[DRAFTER] = method_of(experiment, drafter)
