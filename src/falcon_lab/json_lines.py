"""Files of JSON lines that grow while something runs, and survive a kill in mid-line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, in a line of its own even where a kill cut off the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if _cut_off(file):
            file.write(b"\n")  # costs that line alone
        file.write(json.dumps(record).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record; what a kill cut off is left out, and a missing file is empty."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _cut_off(file: Any) -> bool:
    """Whether the file's last line has no end."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return bool(file.read(1) != b"\n")
