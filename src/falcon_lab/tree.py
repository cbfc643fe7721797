"""The token tree: what drafting produces and verification consumes.

Shapes: N tree nodes (root and probes counted), C of them without the probes, R rows of draft
distributions, D length of the longest path, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from falcon_lab.interfaces import Probes, Proposal


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens with their parents; node 0 is the root.

    The root is the newest committed token, which the target has not read yet: verifying the tree
    reads it together with the drafts. Nodes are ordered so that a parent comes before its
    children and siblings come in the order in which a sampling rule must try them. Behind these C
    nodes there may be probes, which are verified too and can never be accepted: they have no
    parents, and acceptance rules are given ``drafts``, the tree without them.

    Attributes:
        tokens: ``[N]`` long.
        parents: ``[C]`` long, index of the parent node; -1 for the root.
        depth: ``[N]`` long, 0 for the root. A node's position is the root's plus its depth.
        ancestors: ``[N, N]`` bool; ``ancestors[i, j]`` says that j is i or an ancestor of i, or
            that probe i sees j.
        proposal: how siblings were chosen; the acceptance rule follows from it.
        log_q: ``[C]`` float, the drafter's log-probability of each node given its parent path
            (0 for the root).
        q: ``[R, V]`` float, the distributions that nodes were sampled from (``"sampled"`` only).
        q_row: ``[C]`` long, row of ``q`` that each node was drawn from; -1 for the root.
        routes: ``[C, D + 1]`` long, where the shape is known ahead of time: the nodes from the
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
        """N: what the target reads, the root and the probes counted."""
        return self.tokens.shape[0]

    @property
    def drafted(self) -> int:
        """Draft tokens: C without the root."""
        return self.parents.shape[0] - 1

    @property
    def probes(self) -> int:
        """Nodes that can never be accepted."""
        return self.nodes - self.parents.shape[0]

    @property
    def max_depth(self) -> int:
        """Length of the longest draft path. (Without ``routes`` the device is asked.)"""
        if self.routes is not None:
            return self.routes.shape[1] - 1
        return int(self.depth[: self.parents.shape[0]].max())

    @property
    def reach(self) -> int:
        """Depth of the deepest node, probes counted. (With them the device is asked.)"""
        return int(self.depth.max()) if self.probes else self.max_depth

    @property
    def drafts(self) -> TokenTree:
        """The tree without its probes."""
        if not self.probes:
            return self
        count = self.parents.shape[0]
        return replace(
            self,
            tokens=self.tokens[:count],
            depth=self.depth[:count],
            ancestors=self.ancestors[:count, :count],
        )

    def with_probes(self, probes: Probes) -> TokenTree:
        """The tree with probes behind its own nodes, which see none of them."""
        count = self.parents.shape[0]
        ancestors = torch.cat((self.ancestors.new_zeros(count, probes.sees.shape[1]), probes.sees))
        ancestors[:count, :count] = self.ancestors[:count, :count]
        return replace(
            self,
            tokens=torch.cat((self.tokens[:count], probes.tokens)),
            depth=torch.cat((self.depth[:count], probes.depth)),
            ancestors=ancestors,
        )


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
