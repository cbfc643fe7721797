"""The draft tokens of a round that a KV cache holds provisionally, and what attends to which.

For drafters of one token a pass that read every expanded node: a draft model, or the target itself.

Shapes: F frontier blocks, P provisional tokens before a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from falcon_lab.interfaces import Frontier


class ProvisionalTokens:
    """Counts the passes of a round, and knows the ancestors of every block of the newest one.

    Args:
        read: provisional tokens of the round's first pass, which the root's block attends to.
        device: of the masks.
    """

    def __init__(self, read: int, device: torch.device) -> None:
        self._visible = torch.ones(1, read, dtype=torch.bool, device=device)  # [F, P]
        self._chain = True  # whether every pass had one block
        self.depth = 0  # passes since the root's

    def expand(self, frontier: Frontier) -> Tensor | None:
        """Append a token for every block of a later pass.

        Returns:
            ``[F, P + F]`` bool, its ancestors and itself; None: all of them, in a chain.
        """
        count = frontier.tokens.shape[0]
        own = torch.eye(count, dtype=torch.bool, device=self._visible.device)
        self._visible = torch.cat((self._visible[frontier.parents], own), 1)
        self._chain = self._chain and count == 1
        self.depth += 1
        return None if self._chain else self._visible
