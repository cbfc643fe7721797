from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from falcon_lab.benchmarking.tracing import with_ranges, write_trace
from falcon_lab.errors import FalconLabError


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


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FalconLabError, match=r"trace\.json: the trace cannot be written"):
        write_trace(tmp_path / "file" / "trace.json", {}, lambda engine: None)
