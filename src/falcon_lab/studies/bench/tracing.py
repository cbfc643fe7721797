"""Write a Chrome trace of our loops, by part of the round."""

from __future__ import annotations

import copy
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from falcon_lab.errors import FalconLabError
from falcon_lab.files import about, check_place, write_whole

TOKENS = 16
"""New tokens of a traced generation: some rounds, in a file that a browser can open."""

PARTS: dict[str, dict[str, str]] = {
    "target": {"read": "prefill", "verify": "verify", "step": "verify"},
    "drafter": {"draft": "draft", "observe": "observe"},
    "tree_builder": {"start": "tree", "grow": "tree", "finish": "tree"},
    "rule": {"__call__": "accept", "accept_padded": "accept"},
}
"""Attribute of an engine -> method of it -> name of the range in the trace."""


def write_trace(path: Path, engines: Mapping[str, Any], generate: Callable[[Any], object]) -> None:
    """Let each engine generate once under the profiler; open the file in ``chrome://tracing``.

    Args:
        path: of the file; with ``.gz`` at its end it is compressed.
        engines: name -> engine; the name is a range of the trace.
        generate: lets an engine generate.

    Raises:
        FalconLabError: the file cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        for name, engine in engines.items():
            with record_function(name):
                generate(with_ranges(engine))
    # The end of the temporary name says whether to compress, as that of the path does.
    write_whole(path, lambda each: found.export_chrome_trace(str(each)), also=(RuntimeError,))


def refuse_other_than_a_trace(path: Path) -> None:
    """Refuse a place for a trace that cannot be written, or where a file holds none.

    Raises:
        FalconLabError: with what is wrong with it.
    """
    check_place(path, folder=False)
    with about(path, "read", also=(EOFError, zlib.error)):
        if not path.exists():
            return
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            beginning = file.read(HEAD)
    if b'"schemaVersion"' not in beginning and b'"traceEvents"' not in beginning:
        raise FalconLabError(
            f"{path}: holds no trace, and would be replaced by one; name another file, or move it"
        )


HEAD = 4096
"""Bytes in which a trace says what it is."""


def with_ranges(engine: Any) -> Any:
    """The engine, with the parts of a round marked in the trace."""
    marked = copy.copy(engine)
    for name, ranges in PARTS.items():
        if hasattr(marked, name):
            setattr(marked, name, _Marked(getattr(marked, name), ranges))
    return marked


class _Marked:
    """Something whose methods open a range; all else is its own."""

    def __init__(self, part: Any, ranges: Mapping[str, str]) -> None:
        self._part, self._ranges = part, ranges

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with record_function(self._ranges["__call__"]):
            return self._part(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in self._ranges:
            return found

        def marked(*arguments: Any, **options: Any) -> Any:
            with record_function(self._ranges[name]):
                given = found(*arguments, **options)
            return _each(given, self._ranges[name]) if isinstance(given, Iterator) else given

        return marked


def _each(passes: Iterator[Any], name: str) -> Iterator[Any]:
    """The same, each one made inside a range."""
    none = object()
    while True:
        with record_function(name):
            made = next(passes, none)
        if made is none:
            return
        yield made
