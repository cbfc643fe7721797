from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.studies.bench.tracing import with_ranges, write_trace


class Part:
    width = 3

    def draft(self, number: int) -> torch.Tensor:
        return torch.ones(number) + 1

    def __call__(self, number: int) -> int:
        return number + 1


class Engine:
    def __init__(self) -> None:
        self.drafter, self.rule = Part(), Part()

    def generate(self) -> int:
        return int(self.drafter.draft(self.drafter.width).sum()) + self.rule(1)


def names(text: str) -> set[str]:
    return {event["name"] for event in json.loads(text)["traceEvents"]}


def test_a_trace_names_the_loops_and_the_parts_of_their_rounds(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    write_trace(path, {"tree": Engine()}, lambda engine: engine.generate())
    assert {"tree", "draft", "accept", "aten::ones"} <= names(path.read_text())
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]


def test_a_trace_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    write_trace(path, {"tree": Engine()}, lambda engine: engine.generate())
    assert "tree" in names(gzip.decompress(path.read_bytes()).decode())


def test_marking_changes_neither_the_engine_nor_what_it_does() -> None:
    engine = Engine()
    marked: Any = with_ranges(engine)
    assert marked.generate() == engine.generate() == 8
    assert type(engine.drafter) is Part
    assert marked.drafter.width == 3


def test_every_pass_over_a_prompt_lies_inside_a_range(tmp_path: Path) -> None:
    class Target:
        def read(self, parts: int) -> Iterator[torch.Tensor]:
            for part in range(parts):
                yield torch.full((2,), part)

    class Reader:
        def __init__(self) -> None:
            self.target = Target()

    read: list[torch.Tensor] = []
    path = tmp_path / "trace.json"
    write_trace(path, {"it": Reader()}, lambda engine: read.extend(engine.target.read(3)))
    assert [int(part[0]) for part in read] == [0, 1, 2]
    events = json.loads(path.read_text())["traceEvents"]
    ranges = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "prefill"]
    filled = [e["ts"] for e in events if e["name"] == "aten::full"]
    assert len(filled) == 3
    assert all(any(start <= at <= stop for start, stop in ranges) for at in filled)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FalconLabError, match=r"file.*cannot be written"):
        write_trace(tmp_path / "file" / "trace.json", {}, lambda engine: None)
