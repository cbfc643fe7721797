"""Multiple-choice questions, as a file has them; nothing here needs torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from falcon_lab.data.documents import MEND, read_jsonl
from falcon_lab.errors import FalconLabError
from falcon_lab.stored import fitted


@dataclass(frozen=True)
class Line:
    """A question as a line of JSON has it, in HellaSwag's words.

    Attributes:
        ctx: the text that is to be continued.
        endings: how it may go on.
        label: the right one of them, counted from 0.
    """

    ctx: str
    endings: list[str]
    label: int

    @property
    def problem(self) -> str:
        """Return what is wrong with it beside its types; empty for nothing."""
        if not self.ctx.strip():
            return "ctx: the text that is to be continued is empty"
        if len(self.endings) < 2:
            return f"endings: at least 2 are needed, found {len(self.endings)}"
        blank = [i for i, ending in enumerate(self.endings) if not ending.strip()]
        if blank:
            return f"endings.{blank[0]}: an ending is empty"
        if not 0 <= self.label < len(self.endings):
            return f"label: {self.label} is none of the {len(self.endings)} endings, from 0"
        return ""


@dataclass(frozen=True)
class Question:
    """A question with the place where it stands, ``file:line``."""

    line: Line
    source: str


def read_questions(file: Path, limit: int | None = None) -> list[Question]:
    """Read a JSONL file of ``{"ctx": …, "endings": […], "label": 0}``; other keys are left out.

    Args:
        file: one question a line.
        limit: so many at the most, evenly spread over the file; None: all.

    Raises:
        FalconLabError: the file cannot be read, has no question, or a line is none; names file,
            line and field.
    """
    found = []
    for number, value in read_jsonl(file):
        where = f"{file}:{number}"
        line = fitted(value, Line, f"{where}: no multiple-choice question", MEND)
        if line.problem:
            raise FalconLabError(f"{where}: no multiple-choice question ({line.problem}); {MEND}")
        found.append(Question(line, where))
    if not found:
        raise FalconLabError(f"{file}: has no multiple-choice question; name another file")
    asked = min(limit or len(found), len(found))
    return [found[number * len(found) // asked] for number in range(asked)]


def digest_of(questions: Sequence[Question]) -> str:
    """Return sixteen hex digits that name the questions, wherever they stand."""
    plain = [(each.line.ctx, each.line.endings, each.line.label) for each in questions]
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]
