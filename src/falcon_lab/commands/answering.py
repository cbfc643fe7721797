"""Answers as they are decoded: text by text on stdout, what they took on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from falcon_lab.commands.arguments import progress

if TYPE_CHECKING:
    from falcon_lab.decoding.generation import Generation
    from falcon_lab.decoding.stopping import StopCondition
    from falcon_lab.interfaces import Acceptance
    from falcon_lab.measure.conversation import EncodedPrompt
    from falcon_lab.measure.engines import Setup
    from falcon_lab.measure.measurement import Engine
    from falcon_lab.tree import TokenTree

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a character of which some bytes are still to come."""


class StoppedError(Exception):
    """The user wants no more of an answer."""


def never() -> bool:
    """Return False: nobody stops the answer."""
    return False


class Stream:
    """Write tokens as text, as soon as they are whole characters.

    Attributes:
        seconds: time spent here, which is not decoding's.
        tokens: all that were written.
    """

    def __init__(
        self, stop: StopCondition, *, color: bool, stopped: Callable[[], bool] = never
    ) -> None:
        self.seconds = 0.0
        self.tokens: list[int] = []
        self._stop, self._color, self._stopped = stop, color, stopped
        self._written = 0

    def on_round(
        self, tokens: list[int], drafted: int, tree: TokenTree | None, accepted: Acceptance | None
    ) -> None:
        """Write a round's tokens: first the ``drafted`` ones, then the target's own.

        Raises:
            StoppedError: after them, where the answer is stopped.
        """
        from falcon_lab.timing import Stopwatch

        with Stopwatch() as watch:
            self._write(tokens[:drafted], drafted=True)
            self._write(tokens[drafted:], drafted=False)
            sys.stdout.flush()
        self.seconds += watch.wall
        if self._stopped():
            raise StoppedError

    def finish(self) -> None:
        """Write what was buffered, and end the line."""
        text = self._stop.text(self.tokens)
        click.echo(text[self._written :])

    def _write(self, tokens: list[int], *, drafted: bool) -> None:
        self.tokens += tokens
        text = self._stop.text(self.tokens)
        new = text[self._written :]
        if not tokens or not new or new.endswith(UNFINISHED):
            return
        self._written = len(text)
        styled = click.style(new, fg="green") if drafted and self._color else new
        click.echo(styled, nl=False, color=self._color)


class Answering:
    """Answer prompts by the drafter of an experiment, or plainly where it has none.

    Args:
        setup: decodes.
        color: whether accepted draft tokens are green.
    """

    def __init__(self, setup: Setup, *, color: bool) -> None:
        self._setup, self._color = setup, color
        drafting: list[Engine] = list(setup.methods().engines.values())
        self._engine: Engine = drafting[0] if drafting else setup.plain()

    @property
    def lossless(self) -> bool:
        """Whether the answers are the target's own."""
        return self._engine.lossless

    def answer(
        self,
        prompt: EncodedPrompt,
        answers: Sequence[Sequence[int]] = (),
        stopped: Callable[[], bool] = never,
    ) -> list[int]:
        """Write the answer to the turn after ``answers``, then speed and τ; return its tokens.

        Args:
            prompt: all turns.
            answers: to the turns before.
            stopped: whether the user wants no more of it; asked after every round.

        Raises:
            FalconLabError: the prompt cannot be encoded or decoded.
        """
        from falcon_lab.timing import Stopwatch

        stream = Stream(self._setup.stop, color=self._color, stopped=stopped)
        generation: Generation | None = None
        with Stopwatch(self._setup.target.device) as watch, suppress(StoppedError):
            generation = self._setup.answer(
                self._engine, prompt, answers=answers, on_round=stream.on_round
            )
        stream.finish()
        if generation is None:
            progress(f"[stopped after {len(stream.tokens)} tokens]")
        else:
            progress(summary(generation, watch.wall - stream.seconds))
        return stream.tokens


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
