"""Folders that are replaced whole: written beside their place and renamed.

What was there stays whole until the new one is. Reading never writes: what a killed exchange left
is read where it lies, and the next writer finishes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, keep_former, make_folder

UNFINISHED = ".unfinished"
"""Marks a folder that may be removed: one that is being written, or was replaced."""


@contextmanager
def replacing_folder(folder: Path, *, also: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Yield an empty folder to write to; it replaces ``folder`` when all went well.

    Of the former folder only files that the new one has too are ever removed: one that holds more
    is kept beside it under a number.

    Args:
        folder: what is replaced.
        also: errors by which a library says that a file cannot be written.

    Raises:
        FalconLabError: it cannot be written; what was there is still there.
    """
    finish_exchange(folder)
    fresh = _removed(folder.with_name(f".{folder.name}.new"))
    try:
        make_folder(fresh)
        with about(folder, also=also):
            (fresh / UNFINISHED).touch()
            yield fresh
            _exchange(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        finish_exchange(folder)
        raise


def _exchange(fresh: Path, folder: Path) -> None:
    """Rename ``fresh`` to ``folder``; if that is killed, ``finish_exchange`` completes it."""
    if folder.is_dir() and files_in(folder) <= files_in(fresh):
        (folder / UNFINISHED).touch()
        folder.rename(set_aside(folder))
    else:
        keep_former(folder)
    fresh.rename(folder)
    (folder / UNFINISHED).unlink()
    _removed(set_aside(folder))


def files_in(folder: Path) -> set[str]:
    """Return what is in a folder, and in those in it, by its path in it."""
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


def finish_exchange(folder: Path) -> None:
    """Restore the old folder, or remove it, after an exchange that was killed; take the mark away.

    Raises:
        FalconLabError: what is there was not set aside by an exchange.
    """
    old, mark = set_aside(folder), folder / UNFINISHED
    with about(folder):
        if not folder.exists() and (old / UNFINISHED).exists():
            old.rename(folder)
        if mark.exists():  # a folder of that name is whole
            mark.unlink()
    _removed(old)


def _removed(path: Path) -> Path:
    """Remove a folder that was marked for it, the mark last, or an empty one; return its path.

    Raises:
        FalconLabError: something else is there.
    """
    there = {file.name for file in path.iterdir()} if path.is_dir() else set[str]()
    if UNFINISHED in there or (path.is_dir() and not there):
        with suppress(OSError):
            for name in there - {UNFINISHED}:
                inner = path / name
                shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
            shutil.rmtree(path)
    elif os.path.lexists(path):
        raise FalconLabError(
            f"{path}: is in the way of saving a drafter; move it, or remove it if nobody needs it"
        )
    return path


def whole(folder: Path, mark: str) -> Path:
    """Return where a folder lies: in its place, or set aside where an exchange was killed.

    Args:
        folder: its place.
        mark: the file that it has when it is one.
    """
    old = set_aside(folder)
    return old if not folder.exists() and (old / mark).is_file() else folder


def set_aside(folder: Path) -> Path:
    """Return where the former folder lies while another takes its place."""
    return folder.with_name(f".{folder.name}.old")
