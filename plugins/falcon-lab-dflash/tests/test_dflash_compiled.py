"""Drafting through compiled passes and graphs, which stand-ins take the place of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_cases import FAMILIES, drafter, engine, inputs, seen, target

from falcon_lab.interfaces import Frontier
from falcon_lab.testing import plain_text, write, write_together
from falcon_lab.testing.compiling import Pretend, Repeating, traced

TREES: list[dict[str, Any]] = [{"name": "chain", "depth": 3}, {"name": "optimal", "nodes": 12}]
LENGTHS = [9, 1, 2, 4, 3, 12, 1]
ROOT = Frontier.root(torch.device("cpu"))


def quiet(line: str) -> None:
    """Drop the line."""


def rounds(made: Any, room: int | None, seed: int = 0) -> list[Any]:
    """What a text's rounds say; the sixth has more new rows than any draft leaves."""
    drawn = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 12, (sum(LENGTHS) + 1,), generator=drawn)
    rows, done, found = inputs(made.host, made, [text]), 0, []
    made.reset(text[0])
    if room is not None:
        made.reserve(room, None)
    for new in LENGTHS:
        made.observe(seen(rows, 0, done, done + new))
        done += new
        found.append(made.draft(ROOT))
    return found


def same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.logits, other.logits, atol=1e-4)
        assert torch.allclose(one.features, other.features, atol=1e-4)


@pytest.mark.parametrize("room", [None, 3, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_passes_and_graphs_say_what_the_modules_say(family: str, room: int | None) -> None:
    made, compiler, recorder = drafter(target(family)), Pretend(), Repeating()
    compiled, replayed = made.compiled(quiet, compiler), made.compiled(quiet, recorder=recorder)
    assert [one.is_compiled for one in (made, compiled, replayed)] == [False, True, True]
    for seed in (0, 1):
        expected = rounds(made, room, seed)
        same(rounds(compiled, room, seed), expected)
        same(rounds(replayed, room, seed), expected)
    assert compiler.calls == recorder.replays == 2 * (len(LENGTHS) - 2)


def test_the_passes_can_be_traced() -> None:
    made = drafter(target(), draft_vocabulary=7)
    same(rounds(made.compiled(quiet, traced), 60), rounds(made, 60))


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_with_everything_compiled_is_the_target_s(
    family: str, tree: dict[str, Any]
) -> None:
    model, compiler, recorder = target(family), Pretend(), Repeating()
    made = drafter(model)
    for prompt in ([5], [3, 1, 4, 1, 5, 9]):
        for fast in (made.compiled(quiet, compiler), made.compiled(quiet, recorder=recorder)):
            whole = engine(model.compiled(quiet, compiler), fast, tree=tree)
            assert write(whole, prompt, 24).tokens == plain_text(model, prompt, 24)
    assert {name.partition("-")[0] for name in compiler.names} == {"drafter", "target"}
    assert recorder.replays > 0


def test_the_passes_of_a_round_are_there_before_it_is_timed() -> None:
    compiler = Pretend()
    made = drafter(target()).compiled(quiet, compiler)
    made.prepare(20)
    assert compiler.names == [f"drafter-3-after-{new}" for new in (1, 2, 4)]
    rounds(made, None)
    assert len(compiler.names) == 3


@pytest.mark.parametrize("graphs", [False, True])
def test_memory_is_counted_exactly(graphs: bool) -> None:
    made = drafter(target()).compiled(quiet, Pretend(), Repeating() if graphs else None)
    tree: Any = None
    for room in (60, 40, 90):
        expected = made.kv_bytes(room, tree)
        rounds(made, room)
        assert made._cache.nbytes == expected
        assert made.kv_allocated == (expected if graphs else 0)


def test_a_second_text_finds_memory_and_graphs_ready() -> None:
    recorder = Repeating()
    made = drafter(target()).compiled(quiet, recorder=recorder)
    rounds(made, 60)
    captured = recorder.captures
    rounds(made, 50, seed=1)
    assert recorder.captures == captured > 0


def test_a_batch_goes_through_the_modules() -> None:
    model, compiler, prompts = target(), Pretend(), [[5], [3, 1, 4], [2, 2]]
    fast = engine(model, drafter(model).compiled(quiet, compiler), tree=TREES[0])
    found = [text.tokens for text in write_together(fast, prompts, 12)]
    assert found == [plain_text(model, prompt, 12) for prompt in prompts]
    assert compiler.calls == 0
