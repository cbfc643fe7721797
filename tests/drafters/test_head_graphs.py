"""Drafting through graphs, which a recorder that runs things again stands in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.decoding import chain, generate, plain, speculative
from fakes.recording import Refusing, Repeating
from falcon_cases import drafter, rows
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext, Frontier, Observation
from falcon_lab.model.target import Target
from falcon_lab.plugins.builtins import FalconConfig
from falcon_lab.trees.templates import named
from tiny_models import tiny_target

ROOT = Frontier.root(torch.device("cpu"))
LENGTHS = [20, 1, 2, 3, 5, 8, 1, 1, 18, 4]


def quiet(line: str) -> None:
    """Takes a line and drops it."""


def falcon(target: Target, block: int, seed: int = 3) -> FalconDrafter:
    torch.manual_seed(seed)
    return FalconDrafter(FalconConfig(block=block), BuildContext(host=target)).eval()


@torch.inference_mode()
def rounds(made: FalconDrafter, lengths: list[int], seed: int = 0) -> list[Any]:
    """What rounds of four passes say, the last three of them branching."""
    generator = torch.Generator().manual_seed(seed)
    tokens, features = rows(sum(lengths), seed)
    made.reset(tokens[0])
    found, done = [], 0
    for new in lengths:
        made.observe(Observation(tokens[done : done + new], features[done : done + new]))
        done += new
        found.append(made.draft(ROOT))
        for parents in ([0], [0, 0, 0], [2, 0]):
            drawn = torch.randint(0, 12, (len(parents), made.block), generator=generator)
            found.append(made.draft(Frontier(drawn, torch.tensor(parents))))
    return found


def same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.logits, other.logits, atol=1e-6)
        assert torch.allclose(one.features, other.features, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"phase": "absolute"},
        {"fuse": "linear"},
        {"fuse": "lstm_positionwise"},
        {"query": "newest"},
        {"query": "mapped", "fuse": "linear"},
    ],
)
@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_replayed_passes_predict_what_the_modules_predict(
    block: int, options: dict[str, Any]
) -> None:
    made, recorder = drafter(block=block, **options), Repeating()
    replayed = made.compiled(quiet, recorder=recorder)
    for seed in (0, 1):
        same(rounds(replayed, LENGTHS, seed), rounds(made, LENGTHS, seed))
    # The first pass of a sequence is the modules' own.
    assert recorder.replays == 2 * (4 * len(LENGTHS) - 1)


def test_a_second_sequence_finds_memory_and_graphs_ready() -> None:
    made, recorder = drafter(block=2), Repeating()
    replayed = made.compiled(quiet, recorder=recorder)
    rounds(replayed, LENGTHS)
    held, captured = replayed.kv_allocated, recorder.captures
    assert held > 0
    same(rounds(replayed, LENGTHS, 1), rounds(made, LENGTHS, 1))
    assert (replayed.kv_allocated, recorder.captures) == (held, captured)
    assert made.kv_allocated == 0


def test_memory_is_counted_exactly() -> None:
    target = tiny_target()
    replayed = falcon(target, 2).compiled(quiet, recorder=Repeating())
    engine = speculative(target, replayed, named("k2-8", 2))
    for length in (300, 30, 900):
        expected = replayed.kv_bytes(length, engine.tree_builder)
        replayed.reset(torch.tensor(1))
        replayed.reserve(length, engine.tree_builder)
        replayed.observe(Observation(torch.arange(4), torch.zeros(4, target.hidden_size)))
        replayed.draft(ROOT)
        assert replayed.kv_allocated == expected


def test_rows_that_outgrow_their_memory_are_read_right() -> None:
    made, recorder = drafter(block=2), Repeating()
    lengths = [20] + [16] * 60  # beyond what a cache has of itself
    replayed = made.compiled(quiet, recorder=recorder)
    tree = speculative(tiny_target(), made, named("k2-8", 2)).tree_builder
    before = replayed.kv_bytes(400, tree)
    same(rounds(replayed, lengths), rounds(made, lengths))
    assert replayed.kv_bytes(400, tree) > before


@pytest.mark.parametrize("after", [0, 3])
def test_without_graphs_it_goes_on_and_says_why_once(after: int) -> None:
    made, recorder, said = drafter(block=2), Refusing(after), list[str]()
    same(rounds(made.compiled(said.append, recorder=recorder), LENGTHS), rounds(made, LENGTHS))
    assert recorder.tried == after + 1
    assert len(said) == 1
    assert said[0].startswith("drafter: no CUDA graphs")


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_greedy_speculation_through_graphs_writes_the_target_s_text(
    family: str, block: int
) -> None:
    target = tiny_target(family, vocab=12)
    one, other = Repeating(), Repeating()
    fast = target.compiled(quiet, recorder=one)
    made = falcon(target, block).compiled(quiet, recorder=other)
    for tree in (chain(2 * block), named("auto", block), named("vicuna", block)):
        engine = speculative(fast, made, tree)
        for prompt, new in (([3, 1, 4, 1, 5], 40), ([2], 20), ([5] * 150, 30)):
            expected = plain(target, prompt, new).tokens
            assert generate(engine, prompt, new).tokens == expected
            assert plain(fast, prompt, new).tokens == expected
    assert one.replays > 0
    assert other.replays > 0


def test_sampled_texts_are_those_of_the_modules() -> None:
    target = tiny_target(vocab=12)
    fast = target.compiled(quiet, recorder=Repeating())
    made = falcon(target, 2).compiled(quiet, recorder=Repeating())
    settings = {"temperature": 0.9, "seed": 3}
    expected = plain(target, [3, 1, 4], 30, **settings).tokens
    assert generate(speculative(fast, made, chain(4)), [3, 1, 4], 30, **settings).tokens == expected
