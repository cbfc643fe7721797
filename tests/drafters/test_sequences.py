from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fakes.decoding import chain
from fakes.drafters import RandomDrafter
from falcon_cases import drafter
from falcon_lab.drafters.head_drafting import Drafting
from falcon_lab.drafters.sequences import OneByOne, copies_of, sequences_of
from falcon_lab.interfaces import Drafter, DraftOutput, Frontier, Observation
from falcon_lab.trees.paths import checked
from falcon_lab.trees.template_tree import TemplateTree
from tiny_models import tiny_target

TREE = TemplateTree(checked(chain(3)), 1, "deterministic")
ROOT = Frontier.root(torch.device("cpu"))


class Counting(nn.Module, Drafter):
    """Remembers, in place, what it observed; has weights, a buffer, a module and a target."""

    needs = frozenset({"features"})

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.block = 1
        self.host = target
        self.head = nn.Linear(3, 4)
        self.register_buffer("table", torch.zeros(5))
        self.told: list[int] = []
        self.expected = 0

    def reset(self, first: Any) -> None:
        self.told.clear()

    def observe(self, observation: Observation) -> None:
        self.told += observation.tokens.tolist()

    def draft(self, frontier: Frontier) -> DraftOutput:
        return DraftOutput(torch.full((1, 1, 64), float(sum(self.told))))

    def kv_bytes(self, positions: int, tree: Any) -> int:
        return positions

    def reserve(self, positions: int, tree: Any) -> None:
        self.expected = positions


def seen(*tokens: int) -> Observation:
    return Observation(torch.tensor(tokens), torch.zeros(len(tokens), 2))


def test_copies_share_weights_and_target_and_nothing_else() -> None:
    original = Counting(tiny_target())
    first, second = copies_of(original, 2)
    assert first.host is original.host
    assert first.head.weight is original.head.weight
    assert first.table is original.table
    first.observe(seen(1))
    assert (first.told, second.told, original.told) == ([1], [], [])


def test_copies_of_what_has_no_attributes_are_made_too() -> None:
    assert copies_of(len, 2) == [len, len]


def test_any_drafter_drafts_row_by_row() -> None:
    rows = sequences_of(Counting(tiny_target()), 3, 40, TREE)
    assert isinstance(rows, OneByOne)
    for row in range(3):
        rows.reset(row, torch.tensor(0))
        rows.observe(row, seen(row, 1))
    found = rows.draft({2: ROOT, 0: ROOT})
    assert {row: float(output.logits[0, 0, 0]) for row, output in found.items()} == {2: 3, 0: 1}
    rows.move(2, 0)
    rows.reset(2, torch.tensor(0))
    rows.observe(2, seen(9))
    found = rows.draft({0: ROOT, 1: ROOT, 2: ROOT})
    assert [float(output.logits[0, 0, 0]) for output in found.values()] == [3, 2, 9]


def test_a_drafter_that_keeps_rows_is_told_how_many() -> None:
    rows = OneByOne([Counting(tiny_target())], 40, TREE)
    rows.reset(0, torch.tensor(0))
    assert rows.drafters[0].expected == 40  # type: ignore[attr-defined]


def test_a_drafter_without_memory_is_told_nothing() -> None:
    rows = sequences_of(RandomDrafter(8, 1), 2, 40, TREE)
    rows.reset(1, torch.tensor(3))
    rows.observe(1, seen(4))
    assert rows.draft({1: ROOT})[1].logits.shape == (1, 1, 8)


def test_a_drafters_own_way_is_taken() -> None:
    assert isinstance(sequences_of(drafter(block=2), 2, 40, TREE), Drafting)
