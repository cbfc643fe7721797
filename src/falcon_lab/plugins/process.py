"""What the code of a plug-in must leave in this process as it finds it.

A plug-in may import libraries, warn, log and set variables of its own. What everything else relies
on is put back: the working directory, where output goes, what ends the process, variables that the
user set, and torch's defaults, which decide what is trained and measured.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from falcon_lab.errors import PluginWarning

OURS = ("FALCON_LAB_CACHE", "FALCON_LAB_PLUGINS")
"""Environment variables that are the user's to set, or not."""


@dataclass(frozen=True)
class Fact:
    """Something about the process, by which it is read and put back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


@contextmanager
def left_as_found(report: Callable[[str], None]) -> Iterator[None]:
    """Put back what the code inside changes of the process.

    Args:
        report: is called at the end with the names of what was put back, if anything was.
    """
    found = [(fact, fact.read()) for fact in _facts()]
    had_torch = bool(_torch())
    changed = []
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            filters = [*warnings.filters]
            try:
                yield
            finally:
                if not had_torch:
                    found += _fresh_torch()
                changed += [fact.name for fact, before in found if _put_back(fact, before)]
                if _sweeping(filters):
                    changed.append("the filters of warnings")
                else:
                    stack.pop_all()  # what an import ignores of its own libraries stays ignored
    finally:
        if changed:
            report(", ".join(dict.fromkeys(changed)))


def _put_back(fact: Fact, before: Any) -> bool:
    """Return whether something had changed."""
    now = fact.read()
    if now is before or now == before:
        return False
    with suppress(OSError, TypeError, ValueError):  # such as a folder that was deleted
        fact.write(before)
    return True


def _sweeping(before: Sequence[Any]) -> bool:
    """Return whether filters of warnings are gone, or a new one is about ours too."""
    new = [each for each in warnings.filters if each not in before]
    general = [each for each in new if each[1] is each[3] is None]
    lost = any(each not in warnings.filters for each in before)
    return lost or any(issubclass(PluginWarning, each[2]) for each in general)


# --- the facts ----------------------------------------------------------------------------------


def _facts() -> list[Fact]:
    facts = [
        *(_attribute(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")),
        _attribute(warnings, "showwarning"),
        Fact("logging.disable", lambda: logging.root.manager.disable, logging.disable),
        Fact("sys.settrace", sys.gettrace, sys.settrace),
        Fact("sys.setprofile", sys.getprofile, sys.setprofile),
        Fact("gc", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        _recursion(sys.getrecursionlimit()),
        Fact("the working directory", _folder, os.chdir),
        *(_variable(name) for name in {*os.environ, *OURS}),
        *(Fact("sys.path", partial(_on_path, each), partial(_add, each)) for each in sys.path),
        *_torch(),
    ]
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        facts += [_handler(number) for number in signal.valid_signals()]
    return facts


def _attribute(owner: Any, name: str) -> Fact:
    read, write = partial(getattr, owner, name), partial(setattr, owner, name)
    return Fact(f"{owner.__name__}.{name}", read, write)


def _recursion(limit: int) -> Fact:
    """Return that the limit of recursion is not lower; some libraries need a higher one."""
    return Fact(
        "the limit of recursion",
        lambda: sys.getrecursionlimit() >= limit,
        lambda _: sys.setrecursionlimit(limit),
    )


def _folder() -> Path | None:
    with suppress(OSError):  # it has been deleted
        return Path.cwd()
    return None


def _variable(name: str) -> Fact:
    def write(value: str | None) -> None:
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value

    return Fact(f"the variable {name}", partial(os.environ.get, name), write)


def _on_path(entry: str) -> bool:
    return entry in sys.path


def _add(entry: str, _: bool) -> None:
    sys.path.append(entry)


def _handler(number: signal.Signals) -> Fact:
    name = f"the handler of {getattr(number, 'name', number)}"
    return Fact(name, partial(signal.getsignal, number), partial(signal.signal, number))


def _torch() -> list[Fact]:
    """Return torch's defaults; nothing where torch is not imported, or only in part."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):
        return []
    state = torch.get_rng_state()
    return [
        Fact("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Fact("torch's grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Fact("torch's threads", torch.get_num_threads, torch.set_num_threads),
        Fact("torch's seed", torch.initial_seed, lambda _: torch.set_rng_state(state)),
        Fact(
            "torch's default device",
            torch.get_default_device,
            # Setting the CPU would stand in the way of every call from then on.
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
    ]


def _fresh_torch() -> list[tuple[Fact, Any]]:
    """Return the defaults that torch is imported with."""
    if not (facts := _torch()):
        return []
    dtype, grad = facts[:2]
    return [(dtype, sys.modules["torch"].float32), (grad, True)]


# --- what is printed ----------------------------------------------------------------------------


@contextmanager
def stdout_aside() -> Iterator[None]:
    """Send what is printed inside to stderr: stdout is for a command's own output, often JSON.

    What is written to the file descriptor itself, by a child or a library in C, goes there too.
    """
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        sys.stdout.flush()
    ours = [_stream(sys.stderr), _stream(sys.stderr)]
    with redirect_stdout(ours[0]), redirect_stderr(ours[1]), _descriptors_aside():
        try:
            yield
        finally:
            for stream in ours:
                with suppress(ValueError):  # it was closed
                    stream.flush()


@contextmanager
def _descriptors_aside() -> Iterator[None]:
    with ExitStack() as stack:
        with suppress(OSError):  # one of the two is closed
            for number in (1, 2):
                kept = os.dup(number)
                stack.callback(os.close, kept)
                stack.callback(os.dup2, kept, number)
            os.dup2(2, 1)
        yield


def _stream(stderr: TextIO) -> TextIO:
    """Return a stream that writes where stderr does, and that may be closed."""
    through = io.BufferedWriter(_Through(stderr))
    return io.TextIOWrapper(through, "utf-8", "backslashreplace", write_through=True)


class _Through(io.RawIOBase):
    """Bytes that another stream writes; closing it closes nothing else."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()
