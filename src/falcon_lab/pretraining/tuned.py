"""Tuned targets: what is known of them, and where they lie.

A tuned target is a target of its own, another target's weights trained further. It is kept in the
cache, as an ordinary Hugging Face folder with a card beside the weights, under the fingerprint of
its parent, of the tuner's options and of the data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from falcon_lab.config.schema import TargetConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.files import cached, write_atomically
from falcon_lab.plugins.hooks import TuningOptions
from falcon_lab.pretraining.questions import Question, digest_of, read_questions
from falcon_lab.stored import read_json

CARD = "tuning.json"
"""The file beside the weights of a tuned target that is written last."""

HARMLESS = ("checkpoint_every", "choices", "choices_limit")
"""Options that the weights do not depend on."""


@dataclass(frozen=True)
class Parent:
    """The target that another one was made of."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class PairedShare:
    """Shares of the same questions that parent and tuned target answer right.

    Attributes:
        parent: 0 to 1.
        tuned: 0 to 1.
        difference: tuned less parent.
        low: of its 95 % interval, which is paired.
        high: of the same.
    """

    parent: float
    tuned: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Choices:
    """What parent and tuned target made of multiple-choice questions.

    Attributes:
        file: that they were read from.
        digest: of those that were asked.
        questions: how many these are.
        acc: by the log-likelihood of the endings, as in lm-evaluation-harness.
        acc_norm: by that of each of an ending's characters, likewise.
    """

    file: str
    digest: str
    questions: int
    acc: PairedShare
    acc_norm: PairedShare


@dataclass(frozen=True)
class Tuning:
    """How a target was made of another one, and what that cost.

    Attributes:
        parent: what it was made of.
        tuner: the tuner's node, with all options.
        provenance: whose the tuner is.
        trained: weights that were trained.
        tokens: that training read, padding counted.
        heldout_tokens: of answers that perplexity is measured on.
        parent_perplexity: of the parent there.
        perplexity: of the tuned target there.
        seconds: that training took, from the last time that it was resumed.
        choices: what both make of multiple-choice questions; None where none were asked.
    """

    parent: Parent
    tuner: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    trained: int = 0
    tokens: int = 0
    heldout_tokens: int = 0
    parent_perplexity: float = 0.0
    perplexity: float = 0.0
    seconds: float = 0.0
    choices: Choices | None = None

    @property
    def sentence(self) -> str:
        """Return what was done, and its price."""
        return tuning_sentence(asdict(self))

    def lacks(self, questions: Sequence[Question]) -> bool:
        """Return whether these questions were not asked."""
        asked = None if self.choices is None else self.choices.digest
        return bool(questions) and asked != digest_of(questions)

    def write(self, folder: Path) -> None:
        """Write the card into a folder, behind a README that says the same.

        Raises:
            FalconLabError: they cannot be written.
        """
        write_atomically(folder / "README.md", _readme(self))
        write_atomically(folder / CARD, json.dumps(asdict(self), indent=2) + "\n")


def tuning_sentence(tuning: Mapping[str, Any]) -> str:
    """Return in one clause what ``Tuning`` says, from its plain values."""
    parent, options = tuning["parent"], tuning["tuner"]
    return (
        f"tuned by {options['name']} from {parent['name']} ({parent['fingerprint']}); perplexity "
        f"on {tuning['heldout_tokens']:,} held-out answer tokens {tuning['perplexity']:.3f}, its "
        f"parent's {tuning['parent_perplexity']:.3f}{_of_choices(tuning.get('choices'))}"
    )


def weights_of(tuning: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the plain values of ``Tuning`` without questions, which may be asked later."""
    if tuning is None:
        return None
    tuner = {k: v for k, v in tuning["tuner"].items() if not k.startswith("choices")}
    return {k: v for k, v in tuning.items() if k != "choices"} | {"tuner": tuner}


def _of_choices(choices: Mapping[str, Any] | None) -> str:
    """Return what ``Choices`` says, behind a clause; empty where no questions were asked."""
    if choices is None:
        return ""
    figures = [
        f"{choices[name]['tuned']:.1%} right by {name}, its parent {choices[name]['parent']:.1%} "
        f"({100 * choices[name]['difference']:+.1f} points "
        f"[{100 * choices[name]['low']:+.1f}, {100 * choices[name]['high']:+.1f}])"
        for name in ("acc_norm", "acc")
    ]
    name = Path(choices["file"]).name
    return f"; of {choices['questions']:,} multiple-choice questions ({name}) {'; '.join(figures)}"


def _readme(card: Tuning) -> str:
    """Return the README of a tuned target."""
    return (
        f"---\nbase_model: {json.dumps(card.parent.name)}\nlibrary_name: transformers\n---\n\n"
        f"# {card.parent.name}, {card.sentence}\n\n"
        f"Made by falcon-lab. Its parent has the fingerprint `{card.parent.fingerprint}`. "
        "Speculative decoding of this model is lossless with respect to this model, which is "
        "another one than its parent.\n\n"
        f"```json\n{json.dumps(card.tuner, indent=2)}\n```\n"
    )


def read_tuning(folder: Path) -> Tuning | None:
    """Read the card of the tuned target in a folder; None where there is no whole one."""
    try:
        return read_json(folder / CARD, Tuning, "card of a tuned target", "it is tuned anew")
    except FalconLabError:
        return None


def options_of(node: Mapping[str, Any]) -> TuningOptions:
    """Return what falcon-lab itself reads of a tuner's node."""
    names = [each.name for each in dataclasses.fields(TuningOptions)]
    return TuningOptions(**{name: node[name] for name in names})


def questions_of(config: TargetConfig) -> list[Question]:
    """Return the questions that a tuner's node asks; empty where it asks none.

    Raises:
        FalconLabError: they cannot be read; names file, line and field.
    """
    options = options_of(config.tune or {})
    if options.choices is None:
        return []
    return read_questions(Path(options.choices), options.choices_limit)


def tuned_name(config: TargetConfig) -> str:
    """Return how a tuned target is called."""
    assert config.tune is not None
    return f"{config.name}+{config.tune['name']}"


def tuned_folder(config: TargetConfig, parent: str) -> Path:
    """Return the folder of the finished target.

    Args:
        config: has the tuner's node.
        parent: the parent's fingerprint.

    Raises:
        FalconLabError: the corpus or the chat template cannot be read.
    """
    from falcon_lab.data.corpora import corpus_fingerprint
    from falcon_lab.data.documents import load_template

    assert config.tune is not None
    facts = {key: value for key, value in config.tune.items() if key not in HARMLESS}
    facts |= {
        "parent": parent,
        "corpus": corpus_fingerprint(config.tune["corpus"]),
        "chat_template": load_template(config.tune["chat_template"]),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return cached("targets", tuned_name(config), digest)
