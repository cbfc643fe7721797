"""Law 1 for the real drafter on real models: speculation does not change what the target writes.

A small vocabulary lets an untrained drafter be right often enough for every path length to occur.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.decoding import chain, generate, plain, speculative
from fakes.statistics import chi_square
from fakes.trees import prefix_closed
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.plugins.builtins import DynamicTreeConfig, FalconConfig, OptimalTreeConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.best_first import BestFirstTree, DynamicTree, OptimalTree
from falcon_lab.trees.templates import named
from tiny_models import FAMILIES, tiny_target

BLOCKS = (1, 2, 3, 4)
TREES = ("chain", "auto", "vicuna", "llama", "k3", "k4", "dynamic", "optimal")
NEW = 24


def drafter(target: Any, **options: Any) -> FalconDrafter:
    torch.manual_seed(3)
    return FalconDrafter(FalconConfig(**options), BuildContext(host=target)).eval()


def tree(name: str, block: int) -> Any:
    """A template's paths, or a builder that decides as it goes."""
    context = BuildContext(None, block)  # type: ignore[arg-type]
    if name == "dynamic":
        return DynamicTree(DynamicTreeConfig(), context)
    if name == "optimal":
        return OptimalTree(OptimalTreeConfig(), context)
    return chain(2 * block) if name == "chain" else named(name, block)


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    return {family: tiny_target(family, vocab=12) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_speculation_writes_what_plain_decoding_writes(
    family: str, targets: dict[str, Any]
) -> None:
    target = targets[family]
    prompt = [3, 1, 4, 1, 5]
    expected = plain(target, prompt, NEW)
    accepted = 0
    for block in BLOCKS:
        falcon = drafter(target, block=block)
        for name in TREES:
            got = generate(speculative(target, falcon, tree(name, block)), prompt, NEW)
            assert (got.tokens, got.finish) == (expected.tokens, expected.finish), (block, name)
            accepted += sum(done.accepted for done in got.rounds)
    assert accepted > 0, "no draft token was ever accepted: the test has seen nothing"


SWITCHES = [
    {"fuse": fuse, "query": query, "phase": phase, "layers": layers}
    for fuse, query, phase, layers in product(
        ("lstm", "lstm_positionwise", "linear"),
        ("block", "newest"),
        ("aligned", "absolute"),
        (1, 2),
    )
]


@pytest.mark.parametrize("options", SWITCHES, ids=lambda o: "-".join(map(str, o.values())))
def test_every_switch_of_the_drafter_is_lossless(
    options: dict[str, Any], targets: dict[str, Any]
) -> None:
    target = targets["llama"]
    for block, prompt in product((1, 2, 3), ([2], [3, 1, 4, 1])):
        falcon = drafter(target, block=block, **options)
        got = generate(speculative(target, falcon, named("auto", block)), prompt, NEW)
        assert got.tokens == plain(target, prompt, NEW).tokens


def best_first(block: int) -> st.SearchStrategy[BestFirstTree]:
    """Builders of any limits, those that stop a tree at once too."""
    count, size = st.integers(0, 9), st.integers(1, 9)
    return st.builds(BestFirstTree, st.just(block), nodes=count, depth=count, beam=size, width=size)


@settings(max_examples=80)
@given(data=st.data())
def test_any_tree_for_any_block_is_lossless(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    target = TARGETS.setdefault(family, tiny_target(family, vocab=12))
    block = data.draw(st.sampled_from(BLOCKS))
    shape = data.draw(prefix_closed() | best_first(block))
    prompt = data.draw(st.lists(st.integers(1, 11), min_size=1, max_size=8))
    got = generate(speculative(target, drafter(target, block=block), shape), prompt, NEW)
    assert got.tokens == plain(target, prompt, NEW).tokens


TARGETS: dict[str, Any] = {}


def exact_pairs(target: Any, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """Probability of every pair of next tokens, ``[V, V]``, by reading every continuation."""
    vocab = target.vocab_size
    after = torch.tensor([[*prompt, token] for token in range(vocab)])
    positions = torch.arange(after.shape[1]).expand_as(after)
    logits = target.head(target.teacher(after, torch.zeros_like(after), positions))
    first = sampling.probabilities(logits[0, -2])
    pairs = (first[:, None] * sampling.probabilities(logits[:, -1])).double()
    return pairs / pairs.sum()


SHAPE = {"temperature": 0.8, "top_p": 0.95}
PROMPT = [3, 1, 4]


def sampling_engine(block: int, name: str, proposal: str) -> Any:
    target = tiny_target("llama", vocab=6)
    target.eos_ids = frozenset()
    return speculative(target, drafter(target, block=block), tree(name, block), proposal=proposal)


@pytest.mark.parametrize("name", ["chain", "auto", "dynamic"])
@pytest.mark.parametrize("block", [1, 2])
def test_a_seeds_text_is_plain_decodings_where_candidates_are_chosen(block: int, name: str) -> None:
    engine = sampling_engine(block, name, "deterministic")
    accepted = 0
    for seed in range(40):
        found = generate(engine, PROMPT, 9, seed=seed, **SHAPE)
        assert found.tokens == plain(engine.target, PROMPT, 9, seed=seed, **SHAPE).tokens
        accepted += sum(done.accepted for done in found.rounds)
    assert accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "auto"])
@pytest.mark.parametrize("block", [1, 2])
def test_sampled_speculation_follows_the_targets_own_distribution(block: int, name: str) -> None:
    engine = sampling_engine(block, name, "sampled")
    generator = torch.Generator().manual_seed(41)
    # The first token needs no draft; the second and the third are the speculative ones.
    texts = []
    for _ in range(700):
        texts.append(generate(engine, PROMPT, 3, generator=generator, **SHAPE).tokens)
    triples = torch.tensor(texts)
    commonest = int(triples[:, 0].mode().values)
    kept = triples[triples[:, 0] == commonest][:, 1:]
    exact = exact_pairs(engine.target, [*PROMPT, commonest], Sampling(**SHAPE))
    assert chi_square(kept, exact) > 0.01
