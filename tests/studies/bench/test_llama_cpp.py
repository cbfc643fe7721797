"""A row of llama.cpp for a target in a GGUF file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fakes.llama_cpp import fake_llama_cpp
from falcon_lab.studies.bench import machine
from gguf_files import write_gguf
from running import run
from saved_models import PROMPTS


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(machine.SIDE, "cpu", 128)
    monkeypatch.setenv("FALCON_LAB_PLUGINS", "")
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path / "cache"))


def bench(target: Path, into: Path) -> tuple[str, dict[str, Any]]:
    options = ("--method", "llama-cpp", "--max-new-tokens=8", "--json", into)
    settings = ("evaluation.repeats=1", "evaluation.threads=1", PROMPTS)
    printed = run("bench", "--target", target, *options, *settings)
    return printed, json.loads(into.read_text("utf-8"))


def test_it_decodes_the_targets_own_file_and_its_texts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    module = fake_llama_cpp(write_gguf(path, "Q4_1"), other={5: 9})
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    printed, results = bench(path, tmp_path / "bench.json")
    [model] = module.Llama.made
    assert model.arguments["model_path"] == str(path)
    assert model.arguments["n_threads"] == 1
    found = results["methods"]["llama.cpp"]
    assert found["lossless"] is False
    assert found["identical_share"] == 0
    assert found["tokens_per_second"] > 0
    tokens: dict[str, list[list[int]]] = {"plain": [], "llama.cpp": []}
    for row in results["rows"]:
        tokens[row["method"]].append(row["turns"][0]["tokens"])
    for ours, theirs in zip(*tokens.values(), strict=True):
        assert theirs[:5] == ours[:5]
        assert theirs[5] == 9
    assert "quantised weights" in printed
    assert "llama.cpp (lossy)" in printed


@pytest.mark.parametrize(
    ("module", "reason"),
    [(None, "pip install llama-cpp-python"), (object(), "AttributeError")],
    ids=["missing", "broken"],
)
def test_where_it_cannot_decode_the_reason_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, reason: str
) -> None:
    write_gguf(tmp_path / "model.gguf", "F16")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    printed, results = bench(tmp_path / "model.gguf", tmp_path / "bench.json")
    assert list(results["methods"]) == ["plain"]
    assert reason in results["left_out"]["llama.cpp"]
    assert "Left out: llama.cpp" in printed


def test_where_it_is_installed_it_writes_what_the_numbers_of_the_file_say(tmp_path: Path) -> None:
    """In float32 it has the target's weights, and the module's own interface is tried."""
    pytest.importorskip("llama_cpp", reason="decodes GGUF files; pip install llama-cpp-python")
    write_gguf(tmp_path / "model.gguf", "F32")
    _, results = bench(tmp_path / "model.gguf", tmp_path / "bench.json")
    assert results["left_out"] == {}
    assert results["methods"]["llama.cpp"]["identical_share"] == 1
