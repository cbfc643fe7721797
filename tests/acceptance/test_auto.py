from __future__ import annotations

import torch

from fakes.decoding import CONTEXT
from falcon_lab.acceptance import Auto
from falcon_lab.interfaces import AcceptanceRule
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree, ancestor_matrix

PARENTS = torch.tensor([-1, 0])
TREE = TokenTree(
    torch.tensor([0, 1]),
    PARENTS,
    torch.tensor([0, 1]),
    ancestor_matrix(PARENTS),
    "deterministic",
    torch.zeros(2),
)
LOGITS = torch.tensor([[0.0, 0.5, 0.2], [0.1, 0.0, 0.3]])


def accepted(sampling: Sampling) -> set[tuple[int, int]]:
    rule: AcceptanceRule = Auto(None, CONTEXT)
    assert rule.lossless
    generator = torch.Generator().manual_seed(0)
    found = [rule(TREE, LOGITS, sampling, generator) for _ in range(60)]
    return {(len(each.path), int(each.next_token)) for each in found}


def test_it_is_greedy_at_temperature_zero() -> None:
    assert accepted(Sampling()) == {(2, 2)}


def test_it_samples_above() -> None:
    assert accepted(Sampling(temperature=1.0)) == {(1, 0), (1, 2), (2, 0), (2, 1), (2, 2)}
