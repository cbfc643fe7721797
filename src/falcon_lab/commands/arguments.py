"""Arguments and options that several commands share, and what they say to the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from falcon_lab.config.overrides import Override, plain_overrides
from falcon_lab.environment import is_worker
from falcon_lab.errors import FalconLabError

F = TypeVar("F", bound=Callable[..., Any])

OVERRIDABLE = {"ignore_unknown_options": True}
"""Context settings of a command for which ``--tree.depth=6`` is an override, not an option."""

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
MOST = 10**6
"""Of anything that is counted: what is more was not meant."""
COUNT = click.IntRange(1, MOST)


def files(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete a word with files and folders, and an override with nothing."""
    return [] if "=" in incomplete else [CompletionItem(incomplete, type="file")]


overrides_argument = click.argument(
    "overrides", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]...", shell_complete=files
)
drafter_option = click.option(
    "--drafter", help="A saved drafter: its folder, or a name.", shell_complete=files
)
no_color_option = partial(click.option, "--no-color", is_flag=True)

SETTINGS = {
    "target": "target.name",
    "tree": "tree.name",
    "temperature": "evaluation.temperature",
    "max_new_tokens": "evaluation.max_new_tokens",
    "seed": "evaluation.seed",
}
"""Option -> the key of a configuration that it sets, where it is checked."""

_OPTIONS = {
    "target": click.option(
        "--target",
        help="A target by name, a hub id, a folder or a GGUF file.",
        shell_complete=files,
    ),
    "tree": click.option("--tree", help="A tree builder's name; its options as tree.depth=6."),
    "temperature": click.option("--temperature", type=float, help="0 is greedy."),
    "max_new_tokens": click.option("--max-new-tokens", type=int, help="Tokens to write at most."),
    "seed": click.option("--seed", type=int, help="Of the prompts and of all that is drawn."),
}


def words_argument(metavar: str) -> Callable[[F], F]:
    """Take one thing and its overrides, which may stand before it too; see ``first_and_rest``."""
    return click.argument(
        "words", nargs=-1, type=click.UNPROCESSED, metavar=metavar, shell_complete=files
    )


def settings(*names: str) -> Callable[[F], F]:
    """Give a command the options of ``SETTINGS`` with these names; ``overrides_of`` reads them."""

    def decorate(command: F) -> F:
        for name in reversed(names):
            command = _OPTIONS[name](command)
        return command

    return decorate


def overrides_of(options: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return a command's ``settings`` as overrides, followed by its own."""
    given = [f"{key}={options[name]}" for name, key in SETTINGS.items() if _is_given(options, name)]
    return [*given, *overrides]


def quick_defaults(command: str) -> list[Override]:
    """Return what a command that only writes text sets, where nothing else is said."""
    return plain_overrides({"target.lean": True}, f"falcon-lab {command}")


def _is_given(options: dict[str, Any], name: str) -> bool:
    return options.get(name) is not None


def counts(context: click.Context, option: click.Parameter, text: str | None) -> tuple[int, ...]:
    """Return ``1,4,8`` as numbers from one to ``MOST``, ascending, each once."""
    words = text.split(",") if text else []
    try:
        found = sorted({int(word) for word in words})
    except ValueError:
        found = [0]
    if found and not 1 <= found[0] <= found[-1] <= MOST:
        which = f"numbers of at least 1 and at most {MOST:,}, as in 1,4,8"
        raise FalconLabError(f"{option.opts[0]} takes {which}: {text}")
    return tuple(found)


def first_and_rest(words: Sequence[str], what: str) -> tuple[str, list[str]]:
    """Return the first word that is no override, and all the others in order.

    Raises:
        FalconLabError: there is none.
    """
    for index, word in enumerate(words):
        override = "=" in word and not os.path.lexists(word)
        if not word.startswith("-") and not override:
            return word, [*words[:index], *words[index + 1 :]]
    raise FalconLabError(f"name {what}; --help shows how")


def wants_color(refused: bool) -> bool:
    """Return whether to colour: not on request, in a pipe, or where NO_COLOR is set."""
    return not refused and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def announce(line: str) -> None:
    """Print a line on stdout; only the first process of a distributed run does."""
    if not is_worker():
        click.echo(line)


def progress(line: str) -> None:
    """Print a line on stderr, where stdout has the command's own output."""
    click.echo(line, err=True)
