"""Sequences drafted for side by side are drafted for as each would be alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from falcon_cases import HIDDEN, VOCABULARY, drafter
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.drafters.sequences import copies_of
from falcon_lab.interfaces import DraftOutput, Frontier, Observation

OPTIONS = [
    {"block": block, "query": query, "phase": phase}
    for block in (1, 2, 3)
    for query in ("block", "newest", "mapped")
    for phase in ("aligned", "absolute")
]


TREE: Any = SimpleNamespace(max_depth=9, max_nodes=4)
"""What is said of the trees that the tests draft."""


class Both:
    """The same calls to ``Drafting`` and to a drafter for each row."""

    def __init__(self, made: FalconDrafter, rows: int) -> None:
        self.block = made.block
        self.ours = made.sequences(rows, 64, TREE)
        self.theirs = copies_of(made, rows)
        self.draws = torch.Generator().manual_seed(0)

    def reset(self, row: int) -> None:
        self.ours.reset(row, torch.tensor(0))
        self.theirs[row].reset(torch.tensor(0))

    def observe(self, row: int, count: int, remaining: int = 0) -> None:
        seen = Observation(self.tokens(count), self.features(count), remaining)
        self.ours.observe(row, seen)
        self.theirs[row].observe(seen)

    def move(self, source: int, goal: int) -> None:
        self.ours.move(source, goal)
        self.theirs[goal], self.theirs[source] = self.theirs[source], self.theirs[goal]

    def draft(self, frontiers: dict[int, Frontier]) -> None:
        found = self.ours.draft(frontiers)
        assert list(found) == list(frontiers)
        for row, frontier in frontiers.items():
            close(found[row], self.theirs[row].draft(frontier))

    def roots(self, rows: list[int]) -> None:
        self.draft({row: Frontier.root(torch.device("cpu")) for row in rows})

    def blocks(self, counts: dict[int, tuple[int, int]]) -> None:
        """Row -> blocks of the pass, and of the one before."""
        self.draft(
            {
                row: Frontier(
                    self.tokens(count, self.block),
                    torch.randint(0, before, (count,), generator=self.draws),
                )
                for row, (count, before) in counts.items()
            }
        )

    def tokens(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, shape, generator=self.draws)

    def features(self, count: int) -> torch.Tensor:
        return torch.randn(count, HIDDEN, generator=self.draws, dtype=torch.float64)


def close(ours: DraftOutput, theirs: DraftOutput) -> None:
    assert ours.features is not None
    torch.testing.assert_close(ours.features, theirs.features)
    torch.testing.assert_close(ours.logits, theirs.logits)


def script(both: Both, seed: int, rounds: int = 4, rows: int = 3) -> None:
    """Rounds of random shapes; in each some rows draft, and some of those stop before others."""
    generator = torch.Generator().manual_seed(seed)

    def upto(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    for row in range(rows):
        both.reset(row)
        both.observe(row, upto(9))
    for number in range(rounds):
        drafting = {row: 1 for row in range(rows) if upto(5) > 1}
        both.roots(list(drafting)) if drafting else None
        passes = 1
        while drafting and passes * both.block < TREE.max_depth:
            passes += 1
            wanted = {row: (upto(3), before) for row, before in drafting.items() if upto(3) > 1}
            if wanted:
                both.blocks(wanted)
            drafting = {row: count for row, (count, _) in wanted.items()}
        if number == 1:  # a sequence ends, and another one takes its row
            both.reset(1)
            both.observe(1, upto(12))
        if number == 2:
            both.move(2, 0)
            both.reset(2)
        for row in range(rows):
            both.observe(row, upto(5))


FUSES = [
    {"block": 2, "fuse": "linear"},
    {"block": 3, "fuse": "lstm_positionwise"},
    {"block": 2, "layers": 2, "lstm_layers": 1},
    {"block": 2, "family": "gpt2"},
    {"block": 2, "family": "mistral"},
]


@pytest.mark.parametrize("options", OPTIONS + FUSES, ids=str)
@torch.no_grad()
def test_every_row_is_drafted_for_as_if_it_were_alone(options: dict[str, Any]) -> None:
    made = drafter(**options)
    for seed in range(2):
        script(Both(made, 3), seed)


@torch.no_grad()
def test_rows_that_go_on_share_a_call_and_a_prompt_has_its_own() -> None:
    made = drafter(block=2)
    calls: list[list[int]] = []
    made.backbone.register_forward_hook(lambda *call: calls.append([*call[-1].shape[:2]]))
    ours, both = made.sequences(3, 64, TREE), Both(made, 3)

    def observe(row: int, count: int) -> None:
        ours.observe(row, Observation(both.tokens(count), both.features(count)))

    for row in range(2):
        ours.reset(row, torch.tensor(0))
        observe(row, 4 + row)
    root = Frontier.root(torch.device("cpu"))
    ours.draft({0: root, 1: root})
    assert calls == [[1, 4], [1, 5]]
    observe(0, 1)
    observe(1, 3)
    ours.reset(2, torch.tensor(0))
    observe(2, 40)
    ours.draft({0: root, 1: root, 2: root})
    assert calls[2:] == [[2, 3], [1, 40]]


@torch.no_grad()
def test_a_row_that_was_left_behind_does_not_widen_the_others() -> None:
    made = drafter(block=2)
    both, calls = Both(made, 2), list[int]()
    for row in range(2):
        both.reset(row)
        both.observe(row, 4)
    both.roots([0, 1])
    both.observe(0, 2)
    both.observe(1, 50)  # as many as no tree has
    hook = made.backbone.register_forward_hook(lambda *call: calls.append(call[-1].shape[1]))
    both.roots([0, 1])
    hook.remove()
    assert calls[:2] == [2, 50]


@torch.no_grad()
def test_the_memory_is_what_the_drafter_says_for_every_row() -> None:
    made = drafter(block=2)
    both = Both(made, 3)
    script(both, 0)
    assert both.ours.nbytes == 3 * made.kv_bytes(64, TREE)


@torch.no_grad()
def test_a_sequence_may_move_before_it_was_drafted_for() -> None:
    both = Both(drafter(block=2), 3)
    both.reset(2)
    both.observe(2, 7, remaining=5)
    both.move(2, 0)
    both.observe(0, 5)
    both.roots([0])


def test_drafting_before_anything_was_observed_is_refused() -> None:
    ours = drafter(block=2).sequences(2, 64, TREE)
    ours.reset(0, torch.tensor(1))
    with pytest.raises(RuntimeError, match="observe"):
        ours.draft({0: Frontier.root(torch.device("cpu"))})
    with pytest.raises(RuntimeError, match="root"):
        ours.draft({0: Frontier(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1).long())})


def test_features_are_needed() -> None:
    ours = drafter(block=2).sequences(1, 64, TREE)
    ours.reset(0, torch.tensor(1))
    ours.observe(0, Observation(torch.tensor([1, 2]), None))
    with pytest.raises(ValueError, match="features"):
        ours.draft({0: Frontier.root(torch.device("cpu"))})
