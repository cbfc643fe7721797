from __future__ import annotations

import io
import sys
import time
from types import SimpleNamespace

import pytest

from falcon_lab.bars import Bar, close_bars


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets."""
    now = SimpleNamespace(seconds=time.time())
    monkeypatch.setattr("tqdm.std.time", lambda: now.seconds)
    return now


def test_a_log_file_gets_a_line_a_minute_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with Bar(total=1000, desc="evaluate", unit="answer", delay=1) as bar:
        for _ in range(1000):
            clock.seconds += 0.25
            bar.update()
            bar.set_postfix_str("plain")  # each of these shows a bar at a terminal
    written = capsys.readouterr().err
    lines = written.splitlines()
    assert 4 <= len(lines) <= 6
    assert "\r" not in written
    assert written.endswith("\n")
    assert "1000/1000" in lines[-1]
    assert all("evaluate" in line for line in lines)


def test_what_takes_no_second_leaves_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in Bar(range(100), delay=1):
        pass
    assert capsys.readouterr().err == ""


def test_a_bar_that_does_not_stay_leaves_no_last_line(
    capsys: pytest.CaptureFixture[str], clock: SimpleNamespace
) -> None:
    with Bar(total=2, leave=False) as bar:
        clock.seconds += 30
        bar.update(2)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Bar(total=3, mininterval=0) as bar:
        bar.update()
        bar.update()
    assert terminal.getvalue().count("\r") >= 3


def test_a_bar_that_an_error_left_open_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = Bar(total=3, mininterval=0)
    bar.update()
    close_bars()
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_whose_making_a_signal_interrupts_can_be_closed(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setattr("tqdm.std.tqdm.refresh", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        Bar(total=3)
    close_bars()  # the traceback keeps the bar alive until here
    assert caught.type is KeyboardInterrupt
    assert sys.stderr.getvalue() == ""
