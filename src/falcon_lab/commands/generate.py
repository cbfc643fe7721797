"""``falcon-lab generate``: text as it is decoded, with the accepted draft tokens coloured."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import torch

from falcon_lab.commands.settings import load, speculative
from falcon_lab.config.schema import Experiment
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.interfaces import Acceptance
from falcon_lab.measure.conversation import EncodedPrompt
from falcon_lab.measure.engines import sampling_of, stop_of
from falcon_lab.timing import Stopwatch
from falcon_lab.tree import TokenTree

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for a character of which some bytes are still to come."""


class Stream:
    """Writes tokens as text, as soon as they are whole characters.

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
        with Stopwatch() as watch:
            self._write(tokens[:drafted], drafted=True)
            self._write(tokens[drafted:], drafted=False)
            sys.stdout.flush()
        self.seconds += watch.wall

    def finish(self) -> None:
        """Write what was held back, and end the line."""
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


def generate_text(
    experiment: Experiment,
    drafter: Path | None,
    prompt: str,
    overrides: Sequence[str],
    *,
    color: bool,
) -> None:
    """Continue ``prompt`` and say how fast that was."""
    target = load(experiment, lambda line: click.echo(line, err=True))
    drafting = speculative(experiment, target, drafter, overrides)
    engine = drafting or PlainEngine(target, decoding=experiment.decoding)
    chat = bool(getattr(target.tokenizer, "chat_template", None))
    encoded = EncodedPrompt("prompt", "", (prompt,), target.tokenizer, chat, target.device)
    stop = stop_of(experiment, target)
    stream = Stream(stop, color=color)
    config = experiment.evaluation
    generation = engine.generate(
        encoded.tokens([]),
        max_new_tokens=config.max_new_tokens,
        sampling=sampling_of(experiment),
        generator=torch.Generator(target.device).manual_seed(config.seed),
        stop=stop,
        on_round=stream.on_round,
    )
    stream.finish()
    click.echo(summary(generation, generation.seconds.total - stream.seconds), err=True)
    if not engine.lossless:
        click.echo("the acceptance rule is lossy: this is not the target's own text", err=True)


def summary(generation: Generation, seconds: float) -> str:
    """Speed and τ in a line. The first token is the prompt's and is not timed."""
    tokens, rounds = len(generation.tokens), generation.rounds
    line = f"[{tokens} tokens, ended by {generation.finish}"
    if rounds:
        emitted = sum(each.emitted for each in rounds)
        line += f", {emitted / max(seconds, 1e-9):.1f} tokens/s"
        if any(each.nodes for each in rounds):
            accepted = sum(each.accepted for each in rounds) / len(rounds)
            line += f", τ {emitted / len(rounds):.2f} with the bonus token, {accepted:.2f} without"
    return line + "]"
