"""Which keys and values of committed tokens are precise, round after round.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from easyspec_cases import LAYERS, VOCAB, drafter, saved
from falcon_lab_easyspec import EasySpecConfig
from falcon_lab_easyspec.calibration import CalibratedDrafting
from falcon_lab_easyspec.groups import plan_of
from torch import Tensor

from falcon_lab.interfaces import Frontier, LayerPlan, Observation

ROOT = Frontier.root(torch.device("cpu"))
GROUPS = [[1, 2, 3, 4]]
PROMPT = [5, 3, 9, 2, 7]


def keys(draft: Any, tokens: Sequence[int], plan: LayerPlan) -> Tensor:
    """Keys of the last layer of a group, which differ where what it reads does: ``[T, ·]``."""
    cache = draft.model.backbone.new_cache(len(tokens))
    mask = torch.ones(1, len(tokens), len(tokens)).tril().bool()
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        draft.model.backbone(
            tokens=torch.tensor([tokens]), positions=positions, mask=mask, cache=cache, plan=plan
        )
    return cached(cache, len(tokens))


def cached(cache: Any, count: int) -> Tensor:
    return cache.tensors()[0][LAYERS - 2][0, :, :count].transpose(0, 1).flatten(1).clone()


class Text:
    """A draft model's text; after every root pass, which of its tokens have precise keys."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.tokens = draft, list(PROMPT)
        draft.reset(torch.tensor(PROMPT[0]))
        draft.observe(Observation(torch.tensor(PROMPT[1:3]), None, len(PROMPT) - 3))
        draft.observe(Observation(torch.tensor(PROMPT[3:]), None, 0))

    def root(self) -> list[bool]:
        self.draft.draft(ROOT)
        found = cached(self.draft._drafting._cache, len(self.tokens))
        precise = keys(self.draft, self.tokens, LayerPlan())
        return [
            torch.allclose(one, other, atol=1e-4) for one, other in zip(found, precise, strict=True)
        ]

    def commit(self, drafted: int, accepted: int) -> None:
        """Draft a chain, whose root pass is made, and accept the first tokens of it."""
        chain = [1 + n % (VOCAB - 1) for n in range(len(self.tokens), len(self.tokens) + drafted)]
        for token in chain[:-1]:
            self.draft.draft(Frontier(torch.tensor([[token]]), torch.tensor([0])))
        new = [*chain[:accepted], 11]
        self.tokens += new
        self.draft.observe(Observation(torch.tensor(new), None, 0))


def precise(draft: Any, rounds: Sequence[tuple[int, int]]) -> list[int]:
    """How many tokens of the text have precise keys after each root pass: always the first ones."""
    text, found = Text(draft), []
    for drafted, accepted in (*rounds, (0, 0)):
        right = text.root()
        count = sum(right)
        assert right == [n < count for n in range(len(right))]
        found.append(count)
        if drafted:
            text.commit(drafted, accepted)
    return found


# Of chains of 3: all accepted, all accepted, one, none, all.
ROUNDS = [(3, 3), (3, 3), (3, 1), (3, 0), (3, 3)]
LENGTHS = [5, 9, 13, 15, 16, 20]


@pytest.mark.parametrize(
    ("calibration", "expected"),
    [
        ("every_round", LENGTHS),
        ("prefill", [5] * 6),
        ("every_mismatch", [5, 5, 5, 15, 16, 16]),
    ],
)
def test_keys_are_precise_as_far_as_the_calibration_says(
    calibration: str, expected: list[int], tmp_path: Path
) -> None:
    made = drafter(model=saved(tmp_path), groups=GROUPS, calibration=calibration)
    assert precise(made, ROUNDS) == expected


def test_without_calibration_all_keys_are_those_of_groups(tmp_path: Path) -> None:
    made = drafter(model=saved(tmp_path), groups=GROUPS, calibration="never")
    text = Text(made)
    text.root()
    text.commit(3, 1)
    assert sum(text.root()) < len(text.tokens) / 2
    found = cached(made._drafting._cache, len(text.tokens))
    expected = keys(made, text.tokens, plan_of(EasySpecConfig(groups=GROUPS), LAYERS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Forgetful(CalibratedDrafting):
    """Keeps accepted tokens as they were drafted, and reads the bonus token alone."""

    def observe(self, tokens: Tensor, remaining: int) -> None:
        kept = len(tokens) - 1 if self._passes else 0
        super().observe(tokens[kept:], remaining)
        self._length += kept
        self._known += kept


def test_a_calibration_that_leaves_fuzzy_keys_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("falcon_lab_easyspec.drafter.CalibratedDrafting", Forgetful)
    text = Text(drafter(model=saved(tmp_path), groups=GROUPS))
    assert all(text.root())
    text.commit(3, 2)
    assert text.root() == [True] * 5 + [False] * 3
