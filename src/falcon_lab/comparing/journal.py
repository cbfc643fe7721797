"""What every drafter answered, kept line by line, so that a killed comparison goes on.

The file is named by all that decides what is measured: the same comparison finds its rows again,
and so does another one of the same folder that measures just the same, for another table.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from falcon_lab.evaluation.rows import TurnRow
from falcon_lab.json_lines import append_line, read_lines

FOLDER = "rows"


class RowJournal:
    """A ``Journal`` of the benchmark in a file of JSON lines.

    Args:
        path: the file; what it holds is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = secrets.token_hex(4)
        self._answers: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
        self._peaks: dict[str, int | None] = {}
        for record in read_lines(path):
            if "peak" in record:
                self._peaks[record["method"]] = record["peak"]
            elif "turns" in record:
                at = (record["repeat"], record["prompt"])
                self._answers.setdefault(at, {})[record["method"]] = record

    @classmethod
    def open(cls, folder: Path, kind: str, facts: Mapping[str, Any]) -> RowJournal:
        """The journal of a measurement.

        Args:
            folder: of the comparison.
            kind: begins the file's name.
            facts: plain values that decide what is measured; the file's first line.
        """
        text = json.dumps(facts, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        path = folder / FOLDER / f"{kind}-{digest}.jsonl"
        if not path.exists():
            append_line(path, {"facts": json.loads(text)})
        return cls(path)

    def __len__(self) -> int:
        """Answers that were there when it was opened."""
        return sum(map(len, self._answers.values()))

    def group(
        self, repeat: int, prompt: str, methods: Sequence[str]
    ) -> dict[str, list[TurnRow]] | None:
        """What all methods answered, if one process measured all of it."""
        found = self._answers.get((repeat, prompt), {})
        processes = {found[name]["process"] if name in found else None for name in methods}
        if len(processes) != 1 or None in processes:
            return None
        return {
            name: [TurnRow.from_dict(turn) for turn in found[name]["turns"]] for name in methods
        }

    def add(self, repeat: int, prompt: str, method: str, turns: Sequence[TurnRow]) -> None:
        """Append an answer."""
        record = {"repeat": repeat, "prompt": prompt, "method": method, "process": self._process}
        append_line(self.path, record | {"turns": [asdict(turn) for turn in turns]})

    def peaks(self) -> dict[str, int | None]:
        """Method -> bytes at its highest point, of those that were looked at."""
        return dict(self._peaks)

    def add_peak(self, method: str, peak: int | None) -> None:
        """Append a look at the memory; None where the system does not tell."""
        self._peaks[method] = peak
        append_line(self.path, {"method": method, "peak": peak})
