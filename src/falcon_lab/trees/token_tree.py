"""The token tree: what drafting produces and verification consumes.

Shapes: N tree nodes (the root counted), R rows of draft distributions, V vocabulary, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.protocols import Proposal


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens with their parents; node 0 is the root.

    The root is the newest committed token, which the target has not read yet: verifying the tree
    reads it together with the drafts. Nodes are ordered so that a parent comes before its
    children and siblings come in the order in which a sampling rule must try them.

    Attributes:
        tokens: ``[N]`` long.
        parents: ``[N]`` long, index of the parent node; -1 for the root.
        depth: ``[N]`` long, 0 for the root. A node's position is the root's plus its depth.
        ancestors: ``[N, N]`` bool; ``ancestors[i, j]`` says that j is i or an ancestor of i.
        proposal: how siblings were chosen; the acceptance rule follows from it.
        log_q: ``[N]`` float, the drafter's log-probability of each node given its parent path
            (0 for the root).
        q: ``[R, V]`` float, the distributions that nodes were sampled from (``"sampled"`` only).
        q_row: ``[N]`` long, row of ``q`` that each node was drawn from; -1 for the root.
        routes: ``[N, D + 1]`` long, where the shape is known ahead of time: the nodes from the
            root to each one, itself repeated to fill up; D is the longest path's length.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    proposal: Proposal
    log_q: Tensor
    q: Tensor | None = None
    q_row: Tensor | None = None
    routes: Tensor | None = None

    @property
    def nodes(self) -> int:
        """N, the root counted."""
        return self.tokens.shape[0]

    @property
    def drafted(self) -> int:
        """Draft tokens: every node but the root."""
        return self.nodes - 1

    @property
    def max_depth(self) -> int:
        """Length of the longest draft path. (Without ``routes`` the device is asked.)"""
        return int(self.depth.max()) if self.routes is None else self.routes.shape[1] - 1


def ancestor_matrix(parents: Tensor) -> Tensor:
    """``[N]`` parents (root first, -1) -> ``[N, N]`` bool, each row a node's path to the root.

    Every product doubles the steps that are followed, and the host is never asked.
    """
    nodes = parents.shape[0]
    reached = torch.eye(nodes, device=parents.device)
    later = torch.arange(1, nodes, device=parents.device)
    reached[later, parents[1:]] = 1.0
    for _ in range((nodes - 1).bit_length()):
        reached = (reached @ reached).clamp(max=1.0)
    return reached > 0
