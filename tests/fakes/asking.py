"""Drafters that ask the target more than their drafts do.

Shapes: C tree nodes, P probes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import Acceptance, Probes
from falcon_lab.tree import TokenTree


class Asking:
    """Mixed into a drafter: random probes that see what they like. Remembers the answers."""

    def ask(self, most: int, seed: int = 0) -> Any:
        self.max_probes = most
        self.dice = torch.Generator().manual_seed(seed)
        self.answers: list[tuple[TokenTree, Tensor, Acceptance]] = []
        self.asked = 0
        return self

    def probe(self, tree: TokenTree, room: int) -> Probes | None:
        count = int(torch.randint(self.max_probes + 1, (), generator=self.dice))
        if count == 0:
            return None
        self.asked += 1
        sees = torch.rand(count, tree.nodes + count, generator=self.dice) < 0.5
        sees |= torch.eye(count, tree.nodes + count, dtype=torch.bool).roll(tree.nodes, 1)
        tokens = torch.randint(1, 6, (count,), generator=self.dice)
        depth = torch.randint(room + 1, (count,), generator=self.dice)
        return Probes(tokens, depth, sees)

    def harvest(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        self.answers.append((tree, logits, acceptance))
