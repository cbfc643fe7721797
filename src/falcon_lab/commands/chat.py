"""A conversation with a target, turn by turn; every turn goes through its chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from falcon_lab.commands.arguments import progress
from falcon_lab.commands.signals import interrupts_noted
from falcon_lab.commands.streams import stdin_text
from falcon_lab.errors import FalconLabError

if TYPE_CHECKING:
    from falcon_lab.commands.answering import Answering
    from falcon_lab.measure.conversation import EncodedPrompt

LONGEST_ANSWER = 1024
"""Tokens of an answer, where the user does not say how many there may be."""
PROMPT = ">>> "
QUIT, CLEAR = "/quit", "/clear"
HELP = f"{CLEAR} forgets what was said, {QUIT} or Ctrl-D ends, Ctrl-C stops an answer"


class Chat:
    """What was said, and how it goes on.

    Args:
        answering: writes the answers.
        beginning: a conversation without a turn.
        room: tokens that an answer may have.
    """

    def __init__(self, answering: Answering, beginning: EncodedPrompt, room: int) -> None:
        self._answering, self._beginning = answering, beginning
        self._conversation, self._answers = beginning, list[list[int]]()
        positions = beginning.longest or sys.maxsize
        self._longest = positions - min(room, positions // 4)

    def say(self, text: str) -> None:
        """Answer a turn and remember both. Ctrl-C stops the answer; what was said stays.

        Raises:
            FalconLabError: the turn does not fit into the target's context, or its chat template
                refuses it; it is forgotten.
        """
        before = self._conversation, list(self._answers)
        turns = (*self._conversation.turns, text)
        self._conversation = replace(self._conversation, turns=turns)
        try:
            self._forget_oldest()
            with interrupts_noted() as interrupted:
                answer = self._answering.answer(self._conversation, self._answers, interrupted)
        except FalconLabError:
            self._conversation, self._answers = before
            raise
        self._answers.append(answer)

    def clear(self) -> None:
        """Forget what was said."""
        self._conversation, self._answers = self._beginning, []

    def _forget_oldest(self) -> None:
        """Drop the oldest turns until there is room for an answer to the newest."""
        forgotten = 0
        unlimited = replace(self._conversation, longest=None)
        while self._answers and len(unlimited.tokens(self._answers)) > self._longest:
            unlimited = replace(unlimited, turns=unlimited.turns[1:])
            del self._answers[0]
            forgotten += 1
        if forgotten:
            turns = "turn is" if forgotten == 1 else f"{forgotten} turns are"
            progress(f"the target's context is full: the oldest {turns} forgotten")
            self._conversation = replace(self._conversation, turns=unlimited.turns)


def talk(chat: Chat, first: str | None) -> None:
    """Chat with whoever writes to stdin, a turn a line, until they end it.

    Args:
        chat: the conversation.
        first: the first turn, where it is known.

    Raises:
        FalconLabError: a turn cannot be answered. At a terminal that is said and the next asked.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        progress(HELP)
    if first is not None:
        chat.say(first)
    for text in lines(terminal=terminal):
        if text == QUIT:
            break
        if text == CLEAR:
            chat.clear()
            progress("[forgotten]")
            continue
        try:
            chat.say(text)
        except FalconLabError as error:
            if not terminal:
                raise
            progress(f"falcon-lab: {' '.join(str(error).split())}")


def lines(*, terminal: bool) -> Iterator[str]:
    """Yield the lines of stdin that are not blank.

    Raises:
        FalconLabError: one is no text.
    """
    while line := stdin_text(lambda: read_line(terminal=terminal)):
        if text := line.strip():
            yield text


def read_line(*, terminal: bool) -> str:
    """Return the next line with its end, "" where there is none; a terminal is asked for it."""
    if not terminal:
        return sys.stdin.readline()
    try:
        if sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - lets input() edit the line and call back others
            return f"{input(PROMPT)}\n"
        click.echo(PROMPT, nl=False, err=True)
        if line := sys.stdin.readline():
            return line
    except EOFError:
        pass
    except BaseException:
        click.echo(err=True)  # what is said of it gets a line of its own
        raise
    click.echo(err=True)
    return ""
