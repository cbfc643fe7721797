"""With the lossless rules, what is written is the target's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from medusa_cases import FAMILIES, drafter, engine, target

from falcon_lab.testing import accepted, fit, lossless_rounds

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
    model, taken = target(family), 0
    for options in ({}, {"head": "shared", "block": 3, "layers": 2}):
        with_heads = engine(model, drafter(model, **options), tree=tree)
        rounds = lossless_rounds(with_heads, [[5], [3, 1, 4, 1, 5, 9]], 24)
        taken += accepted(rounds)
        assert all(done.passes <= 1 for done in rounds)
    if tree["name"] != "chain":
        assert taken > 0


def chance(rule: str, proposal: str) -> float:
    """That sampled text fits the target's own distribution as badly as this."""
    model = target(vocab=5)
    tree = {"name": "static", "template": {"": 4, "0": 3, "1": 1}, "proposal": proposal}
    by = engine(model, drafter(model), tree=tree, rule={"name": rule})
    generator = torch.Generator().manual_seed(5)
    return fit(by, [3, 1, 4], samples=450, generator=generator, temperature=0.8, top_p=0.95)


@pytest.mark.parametrize("proposal", ["deterministic", "sampled"])
def test_sampled_output_follows_the_target_s_distribution(proposal: str) -> None:
    assert chance("auto", proposal) > 0.01


def test_the_same_test_sees_that_typical_acceptance_does_not() -> None:
    assert chance("typical", "deterministic") < 1e-6
