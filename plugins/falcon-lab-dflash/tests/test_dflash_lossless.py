"""What is written is the target's own, at every temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash_cases import FAMILIES, drafter, engine, target

from falcon_lab.testing import accepted, fit, lossless_rounds

TREES: list[dict[str, Any]] = [
    {"name": "chain", "depth": 5},
    {"name": "static", "template": "auto"},
    {"name": "dynamic", "nodes": 20, "width": 10},
    {"name": "optimal", "nodes": 20},
]
SAMPLED: list[dict[str, Any]] = [
    {"name": "optimal", "nodes": 9},
    {"name": "chain", "depth": 3, "proposal": "sampled"},
    {"name": "static", "template": {"": 3, "0": 2}, "proposal": "sampled"},
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree["name"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_target_s_own(family: str, tree: dict[str, Any]) -> None:
    model, taken = target(family), 0
    for block in (1, 4):
        by = engine(model, drafter(model, block=block), tree=tree)
        rounds = lossless_rounds(by, [[5], [3, 1, 4, 1, 5, 9]], 24)
        taken += accepted(rounds)
        assert all(done.passes <= 1 for done in rounds)
        assert all(done.depth <= block for done in rounds)
    if tree["name"] != "chain":
        assert taken > 0


@pytest.mark.parametrize("tree", SAMPLED, ids=lambda tree: tree["name"])
def test_sampled_output_follows_the_target_s_distribution(tree: dict[str, Any]) -> None:
    model = target(vocab=5)
    by, generator = engine(model, drafter(model), tree=tree), torch.Generator().manual_seed(5)
    chance = fit(by, [3, 1, 4], samples=300, generator=generator, temperature=0.8, top_p=0.95)
    assert chance > 0.01
