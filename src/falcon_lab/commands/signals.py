"""SIGINT, SIGTERM and SIGHUP end a command from within: what is open is closed, and the code tells.

As an exception they pass through Lightning and every ``finally``, so that locks are released and
temporary files removed. Nothing depends on that: what a kill leaves behind is whole as well.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from falcon_lab.environment import is_worker

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
REPEATED = 1.0
"""Seconds in which another signal is the same one once more: terminals and ``timeout`` send two."""
SWALLOWED = 0.5
"""Seconds after which it is looked at whether the exception is still on its way."""
STUCK = 10.0
"""Seconds that a call in C may last, before the process ends without an exception."""
LEFT_ALONE = 15.0
"""Seconds that a worker of a distributed training waits for the first process to end it."""


class Ended(BaseException):
    """A signal ended the command; no ``except Exception`` of a library holds it back.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.name, self.exit_code = signal.Signals(number).name, 128 + number
        super().__init__(self.name)


@contextmanager
def ending_signals_raised(say: Callable[[Ended], None]) -> Iterator[None]:
    """Raise ``Ended`` inside the block for a signal; a second one ends the process at once.

    A signal that was ignored before, as ``nohup`` and a shell's background jobs have it, stays so.

    Args:
        say: is called where the process has to end without the exception.

    Raises:
        Ended: also where a library swallowed the exception, or made another one of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets the main thread alone receive signals
        return
    receiver = _Receiver(say)
    receiver.begin()
    try:
        yield
    except Ended:
        raise
    except BaseException as error:
        if receiver.first is not None:
            raise Ended(receiver.first) from error
        if isinstance(error, KeyboardInterrupt):  # from a handler of a library's own
            raise Ended(signal.SIGINT) from error
        raise
    else:
        if receiver.first is not None:
            raise Ended(receiver.first)
    finally:
        receiver.end()


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end nothing inside the block; what is yielded tells whether it was pressed.

    Pressed once more, it ends the command as outside. Where it is ignored, it stays so.
    """
    noted = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (signal.SIG_IGN, None):
        yield noted.is_set
        return
    since = 0.0

    def restore() -> None:
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal since
        if not noted.is_set():
            since = time.monotonic()
            noted.set()
        elif time.monotonic() - since > REPEATED:
            restore()
            signal.raise_signal(number)

    wakeup = signal.set_wakeup_fd(-1)  # by which a thread waits for the end of the command
    signal.signal(signal.SIGINT, note)
    try:
        yield noted.is_set
    finally:
        restore()


class _Receiver:
    """Raises ``Ended`` at the first signal, and sees to it that the process does end.

    Python drops an exception that a handler raises inside a finaliser or a callback from C, and
    some libraries drop whatever they see: it is raised again. And Python calls no handler while a
    call in C lasts, as of a collective that waits for a process that is gone. A thread has both in
    view; the system's handler writes to its socket at once.
    """

    def __init__(self, say: Callable[[Ended], None]) -> None:
        self.first: int | None = None
        self._say, self._since = say, 0.0
        self._heard, self._over, self._looking = (threading.Event() for _ in range(3))
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup_before = -1
        self._unraisable_before = sys.unraisablehook

    def begin(self) -> None:
        """Receive the signals that are not ignored."""
        before = {number: signal.getsignal(number) for number in ENDING}
        self._before = {n: was for n, was in before.items() if was not in (signal.SIG_IGN, None)}
        for number in self._before:
            signal.signal(number, self._receive)
        descriptor = self._writer.fileno()
        self._wakeup_before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        sys.unraisablehook = self._on_unraisable
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._leave_to_parent)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def end(self) -> None:
        """Leave the signals to whoever had them before."""
        self._over.set()
        self._writer.send(b"\0")
        signal.set_wakeup_fd(self._wakeup_before)
        sys.unraisablehook = self._unraisable_before
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, Ended):  # which is raised again
            self._unraisable_before(unraisable)

    def _leave_to_parent(self) -> None:
        if not self._over.is_set():  # a process that was forked has a socket in common with us
            signal.set_wakeup_fd(-1)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._heard.set()
        if is_worker():
            return
        if self.first is None:
            self.first, self._since = number, time.monotonic()
            raise Ended(number)
        if self._looking.is_set():
            self._looking.clear()
            if not _on_its_way():
                raise Ended(self.first)
        elif time.monotonic() - self._since > REPEATED:
            os._exit(128 + number)

    def _watch(self) -> None:
        number = self._received()
        if number is None:
            return
        if is_worker():  # the first process ends it; what ends alone ends that one with no word
            _wait_for_parent(LEFT_ALONE)
            os._exit(128 + number)
        if not self._heard.wait(STUCK):
            self._say(Ended(number))
            os._exit(128 + number)
        while not self._over.wait(SWALLOWED):
            self._looking.set()
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    def _received(self) -> int | None:
        """Wait for a signal that ends the command, and return its number; None at the end."""
        while not self._over.is_set():
            for number in self._reader.recv(1):
                if number in self._before:
                    return int(number)
        return None


def _wait_for_parent(seconds: float) -> None:
    """Wait until the process that started this one is gone."""
    parent, end = os.getppid(), time.monotonic() + seconds
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(0.1)


def _on_its_way() -> bool:
    """Return whether ``Ended`` is being handled: something is closed because of it."""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, Ended):
            return True
        error = error.__context__
    return False
