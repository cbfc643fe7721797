"""The check of a registered target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from falcon_lab.config.schema import Gate, PretrainingConfig, TargetConfig
from falcon_lab.interfaces import TargetContext
from falcon_lab.model.loading import load_target
from falcon_lab.model.target import Target
from falcon_lab.pretraining.target import train_target
from falcon_lab.testing.tested import ComponentUnderTest, Recipe

TEXT = "The quick brown fox jumps over the lazy dog."

SHORTENED: dict[str, Any] = {
    "documents": 200,
    "steps": 1,
    "warmup_steps": 0,
    "gate": Gate(parse=0, distinct=0, prompts=1, max_new_tokens=4),
}
"""What a recipe is tried with: everything but the time that training takes."""


def check_target(target: Recipe, *, seed: int = 0) -> None:
    """Check that a registered target does what its kind requires.

    - It gives a path, a hub id or a ``PretrainingConfig``, and the same one every time.
    - What a path or a hub id leads to can be a target: it is loaded, in float32 on the CPU. A
      recipe makes one: it is trained for a single step.
    - Its tokenizer gives back a text that it has encoded.

    Args:
        target: a YAML node, or what builds a source from a ``TargetContext``.
        seed: is that of all checks; nothing here is random.

    Raises:
        ContractError: it does not.
        FalconLabError: its model cannot be loaded.
    """
    tested = ComponentUnderTest("target", target, seed)
    said: list[str] = []
    with tested.checking("what it gives"):
        source = tested.build(TargetContext(said.append))
        check_source(tested, source, tested.build(TargetContext(said.append)))
    with tested.checking("its model"):
        check_tokenizer(tested, loaded(source))
    with tested.checking("what it announces"):
        tested.expect(
            all(line and "\n" not in line for line in said),
            "what it announces",
            expected="a line at a time",
            found=said,
            fix="call context.announce with one line",
        )


def check_source(tested: ComponentUnderTest, source: Any, again: Any) -> None:
    """Check what a builder gave, twice."""
    tested.expect(
        isinstance(source, str | Path | PretrainingConfig),
        "what its builder returns",
        expected="a str, a Path or a PretrainingConfig",
        found=type(source).__name__,
        fix="return where the model comes from, not the model",
    )
    tested.expect(
        source == again,
        "what its builder returns the second time",
        expected=source,
        found=again,
        fix="let it depend on its configuration and on what is installed alone",
    )


def loaded(source: Any) -> Target:
    """Load the target of a source; train it for a step where that is a recipe."""
    cpu = TargetConfig(name=str(source), device="cpu", dtype="float32")
    if not isinstance(source, PretrainingConfig):
        return load_target(cpu)
    with TemporaryDirectory() as place:
        train_target("tested", replace(source, **SHORTENED), Path(place), lambda line: None)
        return load_target(replace(cpu, name=place))


def check_tokenizer(tested: ComponentUnderTest, target: Target) -> None:
    """Check that a text comes back from its tokens."""
    tokens = target.tokenizer(TEXT)["input_ids"]
    tested.expect(
        target.tokenizer.decode(tokens, skip_special_tokens=True).strip() == TEXT,
        "a text after encoding and decoding",
        expected=TEXT,
        found=target.tokenizer.decode(tokens, skip_special_tokens=True),
        fix="bring the tokenizer that the model was trained with",
    )
