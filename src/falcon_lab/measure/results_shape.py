"""What ``results.json`` holds at least, so that a report can be made of it.

The file may have been edited, cut or written by somebody else; ``stored`` checks it field by field
against these classes. They name what is read back, and ``docs/results-schema.md`` names all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from falcon_lab.measure.metrics import MethodSummary
from falcon_lab.measure.records import Record
from falcon_lab.measure.statistics import Comparison
from falcon_lab.pretraining.tuned import Tuning


@dataclass(frozen=True)
class Hardware:
    """The machine, and how it was used."""

    cpu: str
    cores: int
    threads: int
    load: float | None
    system: str
    device: str
    gpu: str | None
    dtype: str | None


@dataclass(frozen=True)
class GitState:
    """The repository that the command ran in."""

    commit: str
    dirty: bool


@dataclass(frozen=True)
class Judged:
    """What is known of a target that was trained here."""

    passed: bool
    verdict: str


@dataclass(frozen=True)
class MeasuredTarget:
    """The frozen language model."""

    name: str | None = None
    revision: str | None = None
    fingerprint: str | None = None
    quality: Judged | None = None
    tuning: Tuning | None = None


@dataclass(frozen=True)
class Protocol:
    """How it was measured."""

    repeats: int
    warmup: int


@dataclass(frozen=True)
class ReportSettings:
    """What the experiment says of its report."""

    title: str | None = None


@dataclass(frozen=True)
class PromptSettings:
    """What the experiment says of its prompts."""

    name: str | None = None


@dataclass(frozen=True)
class EvaluationSettings:
    """What the experiment says of its evaluation."""

    prompts: PromptSettings | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class ExperimentSettings:
    """The resolved experiment, as far as a report asks for it."""

    report: ReportSettings | None = None
    evaluation: EvaluationSettings | None = None


@dataclass(frozen=True)
class DrawnTree:
    """A tree of draft tokens, drawn in the report."""

    tokens: list[int]
    parents: list[int]
    texts: list[str]
    accepted: list[int]
    next: str | None = None
    method: str | None = None
    prompt: str | None = None
    round: int | None = None

    def __post_init__(self) -> None:
        """Refuse parents and paths that are not in the tree."""
        count = len(self.tokens)
        if not len(self.parents) == len(self.texts) == count:
            raise ValueError("tokens, parents and texts are not as many")
        if any(not -1 <= parent < place for place, parent in enumerate(self.parents)):
            raise ValueError("a parent stands behind its node")
        if not self.accepted or any(not 0 <= node < count for node in self.accepted):
            raise ValueError("the accepted path is not in the tree")


@dataclass(frozen=True)
class Results:
    """The whole file."""

    schema: int
    name: str | None
    date: str
    command: str
    experiment: ExperimentSettings
    seeds: dict[str, int | None]
    versions: dict[str, str | None]
    hardware: Hardware
    git: GitState | None
    target: MeasuredTarget | None
    components: dict[str, Any]
    protocol: Protocol
    headline: str | None
    labels: dict[str, str]
    methods: dict[str, MethodSummary]
    comparisons: list[Comparison]
    trees: list[DrawnTree]
    rows: list[Record]
    left_out: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together."""
        rows: dict[str, int] = {}
        for record in self.rows:
            rows[record.method] = rows.get(record.method, 0) + 1
            if not record.turns or record.times.wall <= 0:
                raise ValueError(f"the row of {record.method}, {record.prompt} took no time")
        named = [self.headline] if self.headline is not None else []
        named += [side for found in self.comparisons for side in (found.method, found.than)]
        for name in (*named, *rows):
            if name not in self.methods:
                raise ValueError(f"there is no method {name!r}")
        if any(rows.get(name) != summary.prompts for name, summary in self.methods.items()):
            raise ValueError("a method has not one row for every prompt")
