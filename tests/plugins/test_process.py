"""What a plug-in may not keep for itself, and no other test has it take."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import torch

from falcon_lab.plugins.process import left_as_found


@pytest.mark.parametrize(
    ("read", "change", "said"),
    [
        (torch.get_default_device, lambda: torch.set_default_device("meta"), "default device"),
        (torch.get_num_threads, lambda: torch.set_num_threads(3), "threads"),
        (sys.gettrace, lambda: sys.settrace(lambda *_: None), "sys.settrace"),
        (lambda: sys.stdin, lambda: setattr(sys, "stdin", io.StringIO()), "sys.stdin"),
    ],
)
def test_what_code_changes_of_the_process_is_put_back_and_said(
    read: Callable[[], object], change: Callable[[], object], said: str
) -> None:
    before, heard = read(), list[str]()
    with left_as_found(heard.append):
        change()
        assert read() != before
    assert read() == before
    [names] = heard
    assert said in names


def test_nothing_is_said_where_nothing_changes() -> None:
    heard: list[str] = []
    with left_as_found(heard.append):
        torch.zeros(2)
    assert heard == []
