"""What is written is the target's own, at every temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_cases import FAMILIES, drafter, engine, target, write
from scipy.stats import chisquare

from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.sampling import Sampling

TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 5},
    {"name": "static", "template": "auto"},
    {"name": "dynamic", "nodes": 20, "width": 10},
    {"name": "optimal", "nodes": 20},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, tree: dict[str, Any]) -> None:
    model, accepted = target(family), 0
    for block in (1, 4):
        by = engine(model, drafter(model, block=block), tree)
        for prompt in ([5], [3, 1, 4, 1, 5, 9]):
            ours = write(by, prompt, 24)
            assert ours.tokens == write(PlainEngine(model), prompt, 24).tokens
            accepted += sum(round_.accepted for round_ in ours.rounds)
            assert all(round_.passes <= 1 for round_ in ours.rounds)
            assert all(round_.depth <= block for round_ in ours.rounds)
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


@pytest.mark.parametrize(
    "tree",
    [
        {"name": "optimal", "nodes": 9},
        {"name": "chain", "depth": 3, "proposal": "sampled"},
        {"name": "static", "template": {"": 3, "0": 2}, "proposal": "sampled"},
    ],
    ids=lambda tree: tree["name"],
)
def test_sampled_output_follows_the_target_s_distribution(tree: dict[str, Any]) -> None:
    model = target(vocabulary=5)
    by, prompt = engine(model, drafter(model), tree), [3, 1, 4]
    generator = torch.Generator().manual_seed(5)
    shape = {"temperature": 0.8, "top_p": 0.95}
    texts = torch.tensor([write(by, prompt, 3, generator, **shape).tokens for _ in range(400)])
    first = int(texts[:, 0].mode().values)
    kept = texts[texts[:, 0] == first][:, 1:]
    exact = exact_pairs(model, [*prompt, first], Sampling(**shape))
    counts = torch.bincount(kept[:, 0] * 5 + kept[:, 1], minlength=25).double()
    expected = exact * len(kept)
    bins = torch.where(expected < 5, 0, torch.arange(25))  # rare ones are counted together
    bins[expected.argmax()] = 0
    found, wanted = (torch.zeros(25).double().index_add(0, bins, v) for v in (counts, expected))
    used = wanted > 0
    assert chisquare(found[used], wanted[used]).pvalue > 0.01
