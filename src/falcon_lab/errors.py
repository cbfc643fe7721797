"""Errors that the user can mend.

An error of a configuration names the place, the key, what is wrong, and what was probably meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FalconLabError(Exception):
    """An error that the user can mend.

    The message names what is wrong, where, and what to do; the command line prints it in one line,
    without a traceback, and exits with 2.
    """


class PluginWarning(UserWarning):
    """Warn that a plug-in was left out, and why."""


class ConfigError(FalconLabError):
    """An error in a key or value of a configuration.

    Attributes:
        key: the full dotted key, or "" for the file as a whole.
        problem: what is wrong with it, without the place.
        source: the file (with its line) or the override that set it; "" when not known yet.
    """

    def __init__(self, key: str, problem: str, source: str = "") -> None:
        # The command line prints one line, and some of the libraries' messages are longer.
        self.key, self.problem, self.source = key, " ".join(problem.split()), source
        super().__init__(": ".join(part for part in (source, key, self.problem) if part))

    def at(self, source: str) -> ConfigError:
        """Return the same error with its place, unless it already names one."""
        return ConfigError(self.key, self.problem, self.source or source)

    def below(self, key: str) -> ConfigError:
        """Return the same error with its key put below another one."""
        return ConfigError(join(key, self.key) if self.key else key, self.problem, self.source)


def did_you_mean(word: str, known: Iterable[str], *, all_of_them: bool = False) -> str:
    """Return ``; did you mean 'depth'?`` for the nearest known word.

    Args:
        word: what was written.
        known: what could have been written; all of it is listed where nothing is near.
        all_of_them: list all of it in any case.
    """
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    if near and not all_of_them:
        return meant
    listed = f" known: {', '.join(known)}" if known else " none is known"
    return f"{meant or ';'}{listed}"


def one_line(error: BaseException) -> str:
    """Return what an error says, in one line; where it says nothing, the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says; where it says nothing, the name of its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def join(key: str, name: object) -> str:
    """Return the full key of ``name`` below ``key``."""
    return f"{key}.{name}" if key else str(name)
