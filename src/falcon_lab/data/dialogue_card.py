"""The card beside a file of dialogues: who wrote them, how, how many, and what they are like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from falcon_lab.data.corpora import SAMPLES, corpus_files
from falcon_lab.data.dialogue_rules import LOOP_RULE, OVERLAP_RULE, words
from falcon_lab.errors import FalconLabError
from falcon_lab.files import write_atomically
from falcon_lab.stored import read_json

FORMAT = 1
NGRAMS = (1, 2, 3)
"""Words of the n-grams whose distinct ones are counted."""
SHOWN = 20
"""Overlaps that the card shows; all are counted."""


class Author(Protocol):
    """What is asked of the target that dialogues are for."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Writer:
    """The target that wrote the dialogues."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Line:
    """A dialogue as it stands in the file.

    Attributes:
        id: its number among all that were begun.
        messages: question and answer.
        tokens: how many of each were written, or read of a given question.
        given: whether the question was given.
        sampled: whether the answer was sampled, and not greedy.
        finish: why the answer ended.
    """

    id: int
    messages: list[dict[str, str]]
    tokens: list[int]
    given: bool
    sampled: bool
    finish: str

    @property
    def question(self) -> str:
        """Return what was asked."""
        return self.messages[0]["content"]

    @property
    def answer(self) -> str:
        """Return what the target said."""
        return self.messages[1]["content"]


@dataclass
class Card:
    """What is known of a file of dialogues. It also says how far the file is written.

    Attributes:
        target: who wrote them.
        settings: what decides them; a file is continued under the same ones alone.
        kept_out: set of evaluation prompts -> how many of them were compared.
        parts: that are in the file, whole.
        bytes: of the file that are these parts.
        seconds: that writing them took.
        dialogues: in the file.
        question_tokens: of all questions.
        answer_tokens: of all answers.
        counts: of given questions, of sampled answers, and of answers by how they ended.
        dropped: reason -> dialogues that are not in the file.
        overlaps: some of those that were dropped for what they share with an evaluation.
        lengths: of questions and answers, in tokens.
        distinct: n -> share of the answers' n-grams of words that are distinct.
        rules: what counts as looping and as an overlap.
        format: of this file.
    """

    target: Writer
    settings: dict[str, Any]
    kept_out: dict[str, int] = field(default_factory=dict)
    parts: int = 0
    bytes: int = 0
    seconds: float = 0.0
    dialogues: int = 0
    question_tokens: int = 0
    answer_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[str, dict[str, float]] = field(default_factory=dict)
    distinct: dict[str, float] = field(default_factory=dict)
    rules: dict[str, str] = field(
        default_factory=lambda: {"looping": LOOP_RULE, "overlap": OVERLAP_RULE}
    )
    format: int = FORMAT

    @classmethod
    def read(cls, path: Path) -> Card:
        """Read the card of a file of dialogues.

        Raises:
            FalconLabError: there is none, or it is damaged.
        """
        advice = "delete it and the dialogues beside it, or copy it again"
        return read_json(card_path(path), Card, "card of dialogues", advice)

    def write(self, path: Path) -> None:
        """Write the card beside a file of dialogues, whole.

        Raises:
            FalconLabError: it cannot be written.
        """
        write_atomically(card_path(path), json.dumps(asdict(self), indent=2) + "\n")


@dataclass
class Statistics:
    """Counts over the dialogues of a file, as they come."""

    questions: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _grams: dict[int, set[int]] = field(default_factory=lambda: {n: set() for n in NGRAMS})
    _all: dict[int, int] = field(default_factory=lambda: dict.fromkeys(NGRAMS, 0))

    def add(self, line: Line) -> None:
        """Count one more dialogue."""
        self.questions.append(line.tokens[0])
        self.answers.append(line.tokens[1])
        seen = ["given" if line.given else "own", "sampled" if line.sampled else "greedy"]
        for what in (*seen, line.finish):
            self.counts[what] = self.counts.get(what, 0) + 1
        found = words(line.answer)
        for n in NGRAMS:
            grams = [hash(tuple(found[i : i + n])) for i in range(len(found) - n + 1)]
            self._grams[n].update(grams)
            self._all[n] += len(grams)

    def describe(self, card: Card) -> None:
        """Write the counts into a card."""
        card.dialogues = len(self.answers)
        card.question_tokens, card.answer_tokens = sum(self.questions), sum(self.answers)
        card.counts = dict(sorted(self.counts.items()))
        card.lengths = {"question": spread(self.questions), "answer": spread(self.answers)}
        shares = {n: len(self._grams[n]) / max(1, self._all[n]) for n in NGRAMS}
        card.distinct = {str(n): round(share, 4) for n, share in shares.items()}


def spread(counts: Sequence[int]) -> dict[str, float]:
    """Return mean, extremes, median and the 95th percentile of some lengths."""
    if not counts:
        return {}
    ordered = sorted(counts)
    at = {"least": 0.0, "median": 0.5, "p95": 0.95, "most": 1.0}
    found: dict[str, float] = {k: ordered[round(v * (len(ordered) - 1))] for k, v in at.items()}
    return found | {"mean": round(fmean(ordered), 1)}


def card_path(path: Path) -> Path:
    """Return the place of the card of a file of dialogues: ``x.card.json`` of ``x.jsonl.gz``."""
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return path.with_name(f"{stem}.card.json")


def refuse_other_author(corpus: str, target: Author) -> None:
    """Refuse dialogues that another target has written: a drafter learns what its target says.

    Raises:
        FalconLabError: with both targets; also a card that is damaged.
    """
    for path in corpus_files(corpus):
        if path.name.endswith(SAMPLES) and card_path(path).is_file():
            writer = Card.read(path).target
            if writer.fingerprint != target.fingerprint:
                raise FalconLabError(
                    f"data.corpus {path}: dialogues that {writer.name} has written (fingerprint "
                    f"{writer.fingerprint}), and the target is {target.name} "
                    f"({target.fingerprint}); have it write its own with falcon-lab dialogues, or "
                    f"remove {card_path(path).name} to train on them as on any chats"
                )
