"""The check of an engine, a decoding loop of its own."""

from __future__ import annotations

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import Engine
from falcon_lab.interfaces import EngineContext
from falcon_lab.model.target import Target
from falcon_lab.testing.decoding import (
    PROMPTS,
    expect_greedy,
    expect_sampled,
    expect_whole,
    write,
    write_together,
)
from falcon_lab.testing.targets import tiny_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

NEW = 16
"""Tokens of a text."""


def check_engine(engine: Recipe, *, seed: int = 0) -> None:
    """Check that an engine does what its kind requires.

    - A text is as long as asked for, ends at an end token, and is the same every time.
    - Texts that are decoded together are what each is alone.
    - Where the engine says that it is lossless, greedy text is the target's own up to the last
      position, and sampled text follows the target's distribution.

    Args:
        engine: a YAML node, or what builds an engine from an ``EngineContext``.
        seed: of everything random.

    Raises:
        ContractError: it does not.
    """
    tested = ComponentUnderTest("engine", engine, seed)
    target = tiny_target(vocab=12, positions=48, layers=3)
    made = tested.build(EngineContext(target, DecodingConfig()))
    tested.expect(
        isinstance(made, Engine),
        "what it is",
        expected="a falcon_lab.decoding.engine.Engine",
        found=type(made).__name__,
        fix="derive it from that class, or from PlainEngine or PartEngine",
    )
    with tested.checking("texts"):
        check_texts(tested, made)
    if made.lossless:
        with tested.checking("losslessness"):
            check_lossless(tested, target, made)


def check_texts(tested: ComponentUnderTest, made: Engine) -> None:
    """Check lengths, end tokens, repetition and batches."""
    alone = [write(made, prompt, NEW) for prompt in PROMPTS]
    again = [write(made, prompt, NEW).tokens for prompt in PROMPTS]
    together = [one.tokens for one in write_together(made, PROMPTS, NEW, batch_size=2)]
    tokens = [one.tokens for one in alone]
    for what, found in (("decoded again", again), ("decoded together", together)):
        tested.expect(
            found == tokens,
            f"greedy texts, {what}",
            expected=tokens,
            found=found,
            fix="sequences share passes and nothing else, and nothing outlives a text",
        )
    tested.expect(
        all(len(text) == NEW for text in tokens),
        "the length of texts that no token ends",
        expected=NEW,
        found=[len(text) for text in tokens],
        fix="go on until the transcript says that the text has ended",
    )
    last = tokens[-1][-1]
    cut = write(made, PROMPTS[-1], NEW, ends=[last])
    expected = tokens[-1][: tokens[-1].index(last) + 1]
    tested.expect(
        (cut.tokens, cut.finish) == (expected, "eos"),
        f"a text that token {last} ends",
        expected=f"{expected} (eos)",
        found=f"{cut.tokens} ({cut.finish})",
        fix="hand every token to the transcript, which knows the end",
    )


def check_lossless(tested: ComponentUnderTest, target: Target, made: Engine) -> None:
    """Check that texts are the target's own."""
    expect_greedy(tested, target, made, "it")
    expect_whole(tested, target, made, "it")
    expect_sampled(tested, target, made, "it")
