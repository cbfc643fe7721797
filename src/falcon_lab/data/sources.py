"""Finds and reads files of text and code."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from falcon_lab.errors import FalconLabError

CODE = {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".js", ".ts", ".java", ".go", ".rs"}
SCRIPTS = {".rb", ".sh", ".sql", ".html", ".css", ".toml", ".yaml", ".yml"}
TEXT_SUFFIXES = CODE | SCRIPTS | {".txt", ".md", ".rst", ".jsonl"}
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages"}
    | {"pydoc_data", "__pycache__", "turtledemo", "ensurepip", "lib-dynload"}
)
"""Folders of the standard library that are no library code, or not shipped everywhere."""


def read_text(file: Path) -> str | None:
    """The text of a file; None when it is unreadable, not UTF-8, or blank."""
    try:
        text = file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


@cache
def standard_library() -> tuple[tuple[str, Path], ...]:
    """``(relative path, file)`` of the readable sources of this Python's library, sorted.

    Raises:
        FalconLabError: this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        (file.relative_to(root).as_posix(), file)
        for file in sorted(root.rglob("*.py"))
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts) and read_text(file) is not None
    ]
    if not files:
        raise FalconLabError(f"{root}: this Python comes without library sources; use 'generated'")
    return tuple(files)


def text_files(root: Path) -> Iterator[tuple[str, Path]]:
    """``(relative path, file)`` of the text files below a folder, hidden ones left out, sorted."""
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
        if file.suffix in TEXT_SUFFIXES and file.is_file() and not hidden:
            yield file.relative_to(root).as_posix(), file
