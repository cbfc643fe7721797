"""Standard input and output as a command can rely on them, whatever the shell did to them."""

from __future__ import annotations

import os
import select
import shutil
import sys
from collections.abc import Callable

from falcon_lab.errors import FalconLabError
from falcon_lab.files import check_text

STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
READER_LEFT = 141
"""Exit code by which a shell knows a command whose output nobody reads any more (SIGPIPE's)."""


def make_streams_safe() -> None:
    """Let no character that an encoding lacks end a command, and give closed streams a file.

    The number of a closed stream would go to the next file that is opened, and what a library
    prints would be written into that.
    """
    for name, mode in STREAMS.items():  # in the order of their numbers: the lowest one is given
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
        elif mode == "w" and getattr(stream, "errors", "") == "strict":
            stream.reconfigure(errors="backslashreplace")


def stdin_text(read: Callable[[], str]) -> str:
    """Return what ``read`` has from stdin.

    Raises:
        FalconLabError: it is no text.
    """
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise FalconLabError(
            f"standard input: byte {error.start + 1} of the prompt is no {error.encoding}; send "
            "text as UTF-8"
        ) from error
    return check_text(text, "standard input")


def reader_left() -> bool:
    """Return whether stdout or stderr is a pipe that nobody reads any more."""
    if not hasattr(select, "poll"):
        return False
    watched = select.poll()
    for stream in (sys.stdout, sys.stderr):
        try:
            watched.register(stream.fileno(), 0)
        except (OSError, ValueError):  # no file of the system's
            continue
    return any(state & select.POLLERR for _, state in watched.poll(0))


def discard_output() -> None:
    """Send what is still buffered, and all that follows, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null, stream.fileno())
    os.close(null)


def terminal_width() -> int:
    """Return the columns that there are for a table; many where the output is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns
