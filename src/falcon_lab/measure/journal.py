"""Store every answer in a file as it comes, so that a killed measurement can be resumed.

The file's name is a hash of all that decides what is measured, so the same measurement finds its
answers again, for another table too.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from falcon_lab.files import about, append_line, read_lines, write_atomically
from falcon_lab.measure.records import Answer
from falcon_lab.stored import fitting

FOLDER = "rows"


@dataclass(frozen=True)
class _Line:
    """An answer as it stands in the file; one that is not whole is measured again."""

    repeat: int
    prompt: str
    method: str
    process: str
    turns: list[Answer]

    @property
    def is_whole(self) -> bool:
        """Return whether it took some time and its columns have an entry for every round."""
        even = all(turn.rounds.is_even for turn in self.turns)
        return even and bool(self.turns) and all(turn.times.wall > 0 for turn in self.turns)


@dataclass(frozen=True)
class _Peak:
    """The bytes of one method at its highest point; null where the system does not tell."""

    method: str
    peak: int | None


@dataclass(frozen=True)
class _Facts:
    """What a study noted of one method, so that it need not be made to be shown."""

    method: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class _Difference:
    """How far apart two texts were where they part."""

    difference: str
    margin: float
    noise: float | None


class Journal:
    """Answers in a file of JSON lines.

    Args:
        path: the file; what it holds is read.
        begin: its first line, with which it is made when there is something to keep; None: it is
            made without one.
    """

    def __init__(self, path: Path, begin: str | None = None) -> None:
        self.path = path
        self._begin = begin
        self._process = secrets.token_hex(4)
        self._answers: dict[tuple[int, str], dict[str, _Line]] = {}
        self._peaks: dict[str, int | None] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._differences: dict[str, tuple[float, float | None]] = {}
        for line in read_lines(path) if path.exists() else ():
            if found := fitting(line, _Line):
                if found.is_whole:
                    at = (found.repeat, found.prompt)
                    self._answers.setdefault(at, {})[found.method] = found
            elif peak := fitting(line, _Peak):
                self._peaks[peak.method] = peak.peak
            elif facts := fitting(line, _Facts):
                self._facts[facts.method] = facts.facts
            elif apart := fitting(line, _Difference):
                self._differences[apart.difference] = (apart.margin, apart.noise)

    @classmethod
    def open(cls, folder: Path, kind: str, facts: Mapping[str, Any]) -> Journal:
        """Open the journal of a measurement; nothing is written before there is something to keep.

        Args:
            folder: of the study; the file lies in ``rows`` below it.
            kind: begins the file's name.
            facts: plain values that decide what is measured; the file's first line.
        """
        text = json.dumps(facts, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        path = folder / FOLDER / f"{kind}-{digest}.jsonl"
        return cls(path, json.dumps({"facts": json.loads(text)}) + "\n")

    def remove(self) -> None:
        """Remove the file, when all that it holds is kept elsewhere.

        Raises:
            FalconLabError: it cannot be removed.
        """
        with about(self.path):
            self.path.unlink(missing_ok=True)
            if not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()

    def __len__(self) -> int:
        """Count the answers that were there when it was opened."""
        return sum(map(len, self._answers.values()))

    def group(
        self, repeat: int, prompt: str, methods: Sequence[str]
    ) -> dict[str, list[Answer]] | None:
        """Return what all methods answered to a prompt; None unless one process measured it all."""
        found = self._answers.get((repeat, prompt), {})
        processes = {found[name].process if name in found else None for name in methods}
        if len(processes) != 1 or None in processes:
            return None
        return {name: found[name].turns for name in methods}

    def add(self, repeat: int, prompt: str, method: str, turns: Sequence[Answer]) -> None:
        """Append an answer."""
        line = {"repeat": repeat, "prompt": prompt, "method": method, "process": self._process}
        self._append(line | {"turns": [asdict(turn) for turn in turns]})

    def peaks(self) -> dict[str, int | None]:
        """Return the bytes at the highest point of every method that was looked at."""
        return dict(self._peaks)

    def add_peak(self, method: str, peak: int | None) -> None:
        """Append a method's memory; None where the system does not tell."""
        self._peaks[method] = peak
        self._append({"method": method, "peak": peak})

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return what was noted of every method."""
        return dict(self._facts)

    def add_facts(self, method: str, facts: Mapping[str, Any]) -> None:
        """Append what is to be known of a method that is not made."""
        self._facts[method] = dict(facts)
        self._append({"method": method, "facts": dict(facts)})

    def difference(self, key: str) -> tuple[float, float | None] | None:
        """Return margin and noise of a difference that was looked at; None where it was not."""
        return self._differences.get(key)

    def add_difference(self, key: str, margin: float, noise: float | None) -> None:
        """Append margin and noise of a difference, under what identifies its texts."""
        self._differences[key] = (margin, noise)
        self._append({"difference": key, "margin": margin, "noise": noise})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._begin is not None and not self.path.exists():
            write_atomically(self.path, self._begin)
        append_line(self.path, line)
