"""Progress bars: they move at a terminal, and are a line a minute in a log file."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

MINUTE = 60.0
"""Seconds between two lines in a log file."""
BAR_DELAY = 3.0
"""Seconds of work after which a bar appears that is not always worth one."""


class Bar(tqdm):
    """``tqdm`` on stderr which writes whole lines, and few, where that is no terminal.

    A bar that is left behind has a last line there, unless its work was done before a bar appears.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._made = False
        self._moves = sys.stderr is not None and sys.stderr.isatty()
        self._written: float | None = None
        if not self._moves:
            options |= {"mininterval": MINUTE, "dynamic_ncols": False}
        super().__init__(*arguments, **options)
        self._made = True

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar, where it is no terminal only when its minute is over."""
        if self._moves:
            return super().display(msg, pos)
        now = self._time()
        self._written = now if self._written is None else self._written
        if now - self._written >= MINUTE:
            self._write_line(now)
        return True

    def close(self) -> None:
        """End the line of the bar, or write its last line."""
        if not self._made:  # a signal has interrupted that, and tqdm closes it all the same
            self.disable = True
        if not self._moves and not self.disable:
            now = self._time()
            if self.leave and now - self.start_t >= self.delay:
                self._write_line(now)
            self.sp = None  # nothing is left to clear
        super().close()

    def _write_line(self, now: float) -> None:
        self._written = now
        self.fp.write(f"{self}\n")
        self.fp.flush()


def close_bars() -> None:
    """Close every bar that an error left open, so that what is printed next begins a line."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
