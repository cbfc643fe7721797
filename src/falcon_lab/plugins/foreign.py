"""Runs the code of plug-ins: the one place where it is called, and blamed by its distribution.

A plug-in's module is imported, its hook called, its options made and its components built inside
``foreign_code``, which turns whatever they raise into a ``PluginError``. What a component raises
later, while it trains or decodes, is put down to it by ``falcon_lab.plugins.culprits``.
"""

from __future__ import annotations

import signal
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.plugins.hooks import PROJECT
from falcon_lab.plugins.process import left_as_found, stdout_aside

CTRL_C = "Ctrl-C ends it"
PATIENCE = 5.0
"""Seconds after which it is said whose code is still being loaded."""
LONGEST = 300
"""Characters that are shown of a text that a plug-in brings."""


class PluginError(FalconLabError):
    """Name the plug-in whose code raised something; that is the error's cause.

    Attributes:
        reason: what it raised, as ``KeyError: 'block'``.
    """

    def __init__(self, owner: str, doing: str, error: BaseException) -> None:
        self.reason = said(error)
        super().__init__(
            f"{owner}: {doing} raised {self.reason}; mend or update that distribution, or do "
            "without it (--traceback shows where)"
        )


@contextmanager
def foreign_code(owner: str, doing: str, *, slow: str = "") -> Iterator[None]:
    """Run a plug-in's code inside; what it prints goes to stderr.

    What it changes of the process is put back with a ``PluginWarning``. What ends this process
    from outside is handed on, and whose code Ctrl-C interrupted is said.

    Args:
        owner: distribution, version and entry point, for messages.
        doing: what the code is to do, for messages ("building drafter 'x'").
        slow: what to do where it takes longer than ``PATIENCE``; "" where it may.

    Raises:
        PluginError: for whatever the code raises, ``SystemExit`` too, but for a
            ``FalconLabError``, which is the plug-in's own word to the user.
    """

    def changed(names: str) -> None:
        warn(f"{owner}: {doing} changed {names}; that has been put back")

    waiting = threading.Timer(PATIENCE, warn, [f"{owner}: {doing} takes long; {slow}"])
    waiting.daemon = True
    if slow:
        waiting.start()
    try:
        with stdout_aside(), left_as_found(changed):
            yield
    except FalconLabError:
        raise
    except BaseException as error:
        if ends_from_outside(error):
            warn(f"{owner}: {doing} was interrupted")
            raise
        raise PluginError(owner, doing, error) from error
    finally:
        waiting.cancel()


def ends_from_outside(error: BaseException) -> bool:
    """Return whether it is Ctrl-C, or what our own handlers of signals raise.

    Where Python's handler has given way to another, nobody but the code itself raises
    ``KeyboardInterrupt``.
    """
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    ours = str(frame.f_globals.get("__name__")).partition(".")[0] == PROJECT
    return ours and not isinstance(error, Exception)


def warn(text: str) -> None:
    """Warn about a plug-in."""
    warnings.warn(text, PluginWarning, stacklevel=2)


def said(error: BaseException) -> str:
    """Return what was raised, in a line: ``KeyError: 'block'``."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    return shown(f"{type(error).__name__}: {text}").removesuffix(":")


def shown(text: str) -> str:
    """Return a text of a plug-in's in one line of printable characters, cut to ``LONGEST``."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * LONGEST]).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"
