"""Drafting through compiled passes: against the modules, and once compiled for real."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_cases import FAMILIES, HEADS, TREES, drafter, engine, target, text

from falcon_lab.interfaces import Frontier, Observation
from falcon_lab.testing import plain_text, write
from falcon_lab.testing.compiling import Pretend, Repeating

LENGTHS = [9, 1, 2, 4, 1, 5]


def quiet(line: str) -> None:
    """Drop the line."""


@torch.inference_mode()
def rounds(made: Any, lengths: list[int]) -> list[Any]:
    """Logits and hidden states of rounds of four passes, the last three of them branching."""
    host = made.host
    tokens = text(sum(lengths) + 1)
    taps = getattr(made, "taps", ()) or (0,)
    cache = host.new_cache(len(tokens))
    read = host.tapped(taps).prefill(tokens[:-1], cache)
    made.reset(tokens[0])
    found, done = [], 0
    for new in lengths:
        fresh = slice(done, done + new)
        seen = Observation(tokens[1:][fresh], read.features[fresh], taps=read.taps[fresh])
        made.observe(seen)
        done += new
        found.append(made.draft(Frontier.root(tokens.device)))
        for parents in ([0], [0, 0, 0], [2, 0]):
            drawn = text(len(parents), seed=done)[:, None]
            found.append(made.draft(Frontier(drawn, torch.tensor(parents))))
    return found


def same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.logits, other.logits, atol=2e-4)
        assert torch.allclose(one.features, other.features, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
def test_compiled_passes_and_graphs_predict_what_the_modules_predict(
    name: str, family: str
) -> None:
    made, compiler, recorder = drafter(name, on=target(family)), Pretend(), Repeating()
    expected = rounds(made, LENGTHS)
    same(rounds(made.compiled(quiet, compiler), LENGTHS), expected)
    assert compiler.calls == 4 * len(LENGTHS) - 1  # but the prompt's first pass
    same(rounds(made.compiled(quiet, recorder=recorder), LENGTHS), expected)
    assert recorder.replays == compiler.calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("shape", ["chain", "dynamic"])
def test_greedy_text_with_everything_compiled_is_the_target_s(
    shape: str, name: str, family: str
) -> None:
    compiler = Pretend()
    host = target(family).compiled(quiet, compiler)
    made = drafter(name, on=target(family)).compiled(quiet, compiler)
    for prompt, new in (([3, 1, 4, 1, 5], 30), ([2], 20)):
        one = engine(host, made, tree=TREES[shape])
        assert write(one, prompt, new).tokens == plain_text(target(family), prompt, new)
    assert any(name.startswith("target") for name in compiler.names)
    assert any(name.startswith("drafter") for name in compiler.names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_really_compiled_pass_predicts_what_the_modules_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALCON_LAB_CACHE", str(tmp_path))
    made, lines = drafter("eagle3-own"), list[str]()
    lengths = [4, 1]
    compiled = made.compiled(lines.append)
    compiled.prepare(1)
    [line] = lines
    assert line.startswith("compiling drafter-1-by-1-after-0-for-1, once: kept in")
    host, tokens = made.host, text(sum(lengths) + 1)
    read = host.tapped(made.taps).prefill(tokens[:-1], host.new_cache(10))
    outputs = []
    for one in (compiled, made):
        one.reset(tokens[0])
        for start, stop in ((0, 4), (4, 5)):
            rows = slice(start, stop)
            one.observe(Observation(tokens[1:][rows], read.features[rows], taps=read.taps[rows]))
            outputs.append(one.draft(Frontier.root(tokens.device)).logits)
        outputs.append(one.draft(Frontier(tokens[None, :1], torch.tensor([0]))).logits)
    assert torch.allclose(torch.cat(outputs[:3]), torch.cat(outputs[3:]), atol=1e-4)
    assert len(lines) == 1
