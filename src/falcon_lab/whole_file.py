"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; the file takes the place of ``path`` when all went well.

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
