"""Drafters with auxiliary nodes.

Shapes: C tree nodes, P auxiliary nodes, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import Acceptance
from falcon_lab.tree import AuxiliaryNodes, Entrance, TokenTree


class WithAuxiliary:
    """Mixed into a drafter: random auxiliary nodes with any mask. Keeps what it observes.

    With a ``layer`` they enter there, with the root's states.
    """

    def with_nodes(self, most: int, seed: int = 0, *, layer: int = 0) -> Any:
        self.max_auxiliary, self.layer = most, layer
        self.dice = torch.Generator().manual_seed(seed)
        self.observed: list[tuple[TokenTree, Tensor, Acceptance]] = []
        self.rounds = 0
        return self

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        count = int(torch.randint(self.max_auxiliary + 1, (), generator=self.dice))
        if count == 0:
            return None
        self.rounds += 1
        mask = torch.rand(count, tree.nodes + count, generator=self.dice) < 0.5
        mask |= torch.eye(count, tree.nodes + count, dtype=torch.bool).roll(tree.nodes, 1)
        tokens = torch.randint(1, 6, (count,), generator=self.dice)
        depth = torch.randint(max_depth + 1, (count,), generator=self.dice)
        entrance = Entrance(self.layer, lambda states: states[:1].expand(count, -1))
        return AuxiliaryNodes(tokens, depth, mask, entrance if self.layer else None)

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        self.observed.append((tree, logits, acceptance))
