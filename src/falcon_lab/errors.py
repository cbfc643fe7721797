"""The errors that a user can mend.

Errors of a configuration: where, which key, what is wrong, and what was probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FalconLabError(Exception):
    """Something the user can mend.

    The message says what is wrong, where, and what to do; the command line prints it in one line,
    without a traceback, and exits with 2.
    """


class PluginWarning(UserWarning):
    """A plug-in was left out, and why."""


class ConfigError(FalconLabError):
    """A key or value of an experiment that cannot be used.

    Attributes:
        key: the full dotted key, or "" for the file as a whole.
        problem: what is wrong with it, without the place.
        source: the file (with its line) or the override that said it; "" when not known yet.
    """

    def __init__(self, key: str, problem: str, source: str = "") -> None:
        # The command line promises one line, and some of the libraries' messages are longer.
        self.key, self.problem, self.source = key, " ".join(problem.split()), source
        super().__init__(": ".join(part for part in (source, key, self.problem) if part))

    def at(self, source: str) -> ConfigError:
        """The same error with its place, unless it already names one."""
        return ConfigError(self.key, self.problem, self.source or source)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'depth'?`` for the nearest known word; all of them when none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known: {', '.join(known)}" if known else "; none is known"


def join(key: str, name: object) -> str:
    """The full key of ``name`` below ``key``."""
    return f"{key}.{name}" if key else str(name)
