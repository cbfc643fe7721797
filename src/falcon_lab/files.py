"""Files that survive a kill: written whole or not at all, or line by line; and the cache folder."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from falcon_lab.errors import FalconLabError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside ``path`` to write to; the file replaces ``path`` when all went well.

    Readers see the old file or the new one. After an error the old one is still there and the
    other is removed. Each process has a name of its own, which ends as ``path`` does.
    """
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, text: str) -> Path:
    """Write ``text`` under a temporary name and rename it: readers see the old or the new file.

    Raises:
        FalconLabError: when the disk is full or the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or error
        raise FalconLabError(f"{path}: cannot be written ({reason}); nothing was lost") from error
    return path


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append a record, in a line of its own even where a kill cut off the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if _cut_off(file):
            file.write(b"\n")  # costs that line alone
        file.write(json.dumps(record).encode() + b"\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every whole record; what a kill cut off is left out, and a missing file is empty."""
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
    """Return whether the file's last line has no end."""
    if file.seek(0, 2) == 0:
        return False
    file.seek(-1, 2)
    return bool(file.read(1) != b"\n")


def cache_folder() -> Path:
    """Return ``$FALCON_LAB_CACHE``, ``$XDG_CACHE_HOME/falcon-lab`` or ``~/.cache/falcon-lab``."""
    if chosen := os.environ.get("FALCON_LAB_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "falcon-lab"
