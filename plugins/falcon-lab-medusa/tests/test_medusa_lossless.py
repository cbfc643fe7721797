"""With the lossless rules, what is written is the target's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from medusa_cases import FAMILIES, drafter, engine, target, write
from scipy.stats import chisquare

from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.sampling import Sampling

TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 3},
    {"name": "static", "template": "mc_sim_7b_63"},
    {"name": "static", "template": "auto"},
    {"name": "dynamic", "nodes": 12},
    {"name": "optimal", "nodes": 12},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.get("template", tree["name"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, tree: dict[str, Any]) -> None:
    model, accepted = target(family), 0
    for options in ({}, {"head": "shared", "block": 3, "layers": 2}):
        with_heads = engine(model, drafter(model, **options), tree, {"name": "auto"})
        for prompt in ([5], [3, 1, 4, 1, 5, 9]):
            ours = write(with_heads, prompt, 24)
            assert ours.tokens == write(PlainEngine(model), prompt, 24).tokens
            accepted += sum(round_.accepted for round_ in ours.rounds)
            assert all(round_.passes <= 1 for round_ in ours.rounds)
    if tree["name"] != "chain":
        assert accepted > 0


def exact_pairs(model: Any, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """Probability of every pair of next tokens, ``[V·V]``, by reading every continuation."""
    after = torch.tensor([[*prompt, token] for token in range(model.vocab_size)])
    positions = torch.arange(after.shape[1]).expand_as(after)
    logits = model.head(model.teacher(after, torch.zeros_like(after), positions))
    first = sampling.probabilities(logits[0, -2])
    pairs = (first[:, None] * sampling.probabilities(logits[:, -1])).double().flatten()
    return pairs / pairs.sum()


def p_value(rule: str, proposal: str) -> float:
    """Of the pairs that follow the first token, against the target's own distribution."""
    model = target(vocabulary=5)
    tree = {"name": "static", "template": {"": 4, "0": 3, "1": 1}, "proposal": proposal}
    by, prompt = engine(model, drafter(model), tree, {"name": rule}), [3, 1, 4]
    generator = torch.Generator().manual_seed(5)
    shape = {"temperature": 0.8, "top_p": 0.95}
    texts = torch.tensor([write(by, prompt, 3, generator, **shape).tokens for _ in range(600)])
    first = int(texts[:, 0].mode().values)
    kept = texts[texts[:, 0] == first][:, 1:]
    exact = exact_pairs(model, [*prompt, first], Sampling(**shape))
    counts = torch.bincount(kept[:, 0] * 5 + kept[:, 1], minlength=25).double()
    expected = exact * len(kept)
    rare = expected < 5  # counted together, and with the commonest of all where they are few
    bins = torch.where(rare, 0, torch.arange(25))
    bins[expected.argmax()] = 0
    seen, wanted = (torch.zeros(25).double().index_add(0, bins, v) for v in (counts, expected))
    used = wanted > 0
    return float(chisquare(seen[used], wanted[used]).pvalue)


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_sampled_output_follows_the_target_s_distribution(proposal: str) -> None:
    assert p_value("auto", proposal) > 0.01


def test_the_same_test_sees_that_typical_acceptance_does_not() -> None:
    assert p_value("typical", "deterministic") < 1e-6
