"""The quality of a target: held-out loss, and completions that parse and do not loop."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from falcon_lab.config.schema import Gate
from falcon_lab.errors import FalconLabError
from falcon_lab.stored import read_json

T = TypeVar("T")

JUDGEMENT, LOSS = "quality.json", "loss.json"
"""Files beside the weights of a target that was trained here; the first is written last."""


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss of a target that was trained here, over the validation sequences."""

    nats_per_token: float


@dataclass(frozen=True)
class Quality:
    """The figures of a target that was trained here.

    Attributes:
        loss: held-out cross-entropy in nats per token.
        parse: share of greedy completions that ``ast.parse`` accepts.
        distinct: share of distinct tokens in a completion, mean over completions.
        completions: how many were judged.
        passed: whether ``parse`` and ``distinct`` reach the gate.
        verdict: what it misses, or its figures.
    """

    loss: float
    parse: float
    distinct: float
    completions: int
    passed: bool
    verdict: str

    @property
    def sentence(self) -> str:
        """Return the judgement in one clause."""
        return gate_sentence(self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for ``quality.json`` and ``results.json``."""
        return asdict(self)


def gate_sentence(quality: Mapping[str, Any]) -> str:
    """Return the judgement of ``Quality.as_dict`` in one clause."""
    outcome = "passes" if quality["passed"] else "fails"
    return f"it {outcome} its quality gate: {quality['verdict']}"


def distinct_share(tokens: Sequence[int]) -> float:
    """Return distinct tokens over all tokens; 1.0 for no tokens."""
    return len(set(tokens)) / len(tokens) if tokens else 1.0


def complete_part(prompt: str, completion: str, *, finished: bool) -> str | None:
    """Return the text up to its last finished top-level statement, or None where there is none.

    A completion that hit its length limit ends anywhere; what it was in the middle of is dropped
    from the last line that starts at the margin.
    """
    text = prompt + completion
    if finished:
        return text
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line and not line[0].isspace()]
    # A closing bracket at the margin ends a statement and does not start one.
    starts = [i for i in starts if lines[i][0] not in ")]}"]
    kept = "\n".join(lines[: starts[-1]]) if starts else ""
    return kept if len(kept) > len(prompt) else None


def parses(source: str | None) -> bool:
    """Return whether ``ast.parse`` accepts the source."""
    if source is None:
        return False
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def judge(gate: Gate, *, loss: float, parsed: Sequence[bool], distinct: Sequence[float]) -> Quality:
    """Compare the figures with the gate."""
    parse_share, distinct_mean = mean(parsed), mean(distinct)
    missed = []
    if parse_share < gate.parse:
        missed.append(f"{parse_share:.2f} of its completions parse (gate {gate.parse:g})")
    if distinct_mean < gate.distinct:
        missed.append(f"{distinct_mean:.2f} of its tokens are distinct (gate {gate.distinct:g})")
    figures = f"loss {loss:.3f} nats/token, {parse_share:.2f} parse, {distinct_mean:.2f} distinct"
    verdict = f"only {' and only '.join(missed)}" if missed else figures
    return Quality(
        loss=loss,
        parse=parse_share,
        distinct=distinct_mean,
        completions=len(parsed),
        passed=not missed,
        verdict=verdict,
    )


def read_quality(folder: Path) -> Quality | None:
    """Read the judgement of the target in a folder; None where there is none or a damaged one."""
    return _read(folder / JUDGEMENT, Quality)


def read_loss(folder: Path) -> HeldOutLoss | None:
    """Read the held-out loss of the target in a folder, in the same way."""
    return _read(folder / LOSS, HeldOutLoss)


def _read(path: Path, shape: type[T]) -> T | None:
    try:
        return read_json(path, shape, "figures of a target", "they are measured anew")
    except FalconLabError:
        return None
