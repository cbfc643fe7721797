"""The token tree: what drafting produces and verification consumes.

Shapes: N tree nodes (the root and auxiliary nodes counted), C of them without the auxiliary ones, P
auxiliary nodes, H hidden, R draft distributions, D length of the longest path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Proposal = Literal["deterministic", "sampled", "mixed"]
"""How draft tokens were chosen: the top candidates, samples from a known q, or some of either."""

CHOSEN = -1
"""Row of q of a node that was drawn from none."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Where auxiliary nodes that are no tokens enter the target.

    Attributes:
        layer: the decoder layer that reads them first, counted from 0; the layers below it read
            the tree alone.
        states: ``[C, H]``, what that layer reads of the tree's nodes -> ``[P, H]``, what it reads
            of the auxiliary ones.
    """

    layer: int
    states: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AuxiliaryNodes:
    """Tokens that the target reads beside a tree, and that are never accepted.

    Attributes:
        tokens: ``[P]`` long; with an ``entrance`` any, as they are not read.
        depth: ``[P]`` long, positions behind the root's; at least 0.
        mask: ``[P, C + P]`` bool, which of the tree's C nodes (the root among them) and of these
            nodes (itself among them) each one attends to. All attend to the text before the root.
        entrance: where they enter, if that is not the embedding.
    """

    tokens: Tensor
    depth: Tensor
    mask: Tensor
    entrance: Entrance | None = None


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Draft tokens with their parents; node 0 is the root.

    The root is the newest committed token, which the target has not read yet: verifying the tree
    reads it together with the drafts. Nodes are ordered so that a parent comes before its
    children and siblings come in the order in which a sampling rule must try them. Behind these C
    nodes there may be auxiliary ones, which the target reads too and which can never be accepted:
    they have no parents, and acceptance rules are given ``drafts``, the tree without them.

    Attributes:
        tokens: ``[N]`` long.
        parents: ``[C]`` long, index of the parent node; -1 for the root.
        depth: ``[N]`` long, 0 for the root. A node's position is the root's plus its depth.
        ancestors: ``[N, N]`` bool; ``ancestors[i, j]`` says that j is i or an ancestor of i, or
            that the auxiliary node i attends to j.
        proposal: how siblings were chosen; the acceptance rule follows from it.
        log_q: ``[C]`` float, the drafter's log-probability of each node given its parent path
            (0 for the root).
        q: ``[R, V]`` float, the distributions that nodes were sampled from; None where none was.
        q_row: ``[C]`` long, row of ``q`` that each node was drawn from; -1 for the root, and for
            nodes that were chosen (``"mixed"``). Siblings of one row are neighbours, in the order
            in which they were drawn without replacement.
        routes: ``[C, D + 1]`` long, where the shape is known ahead of time: the nodes from the
            root to each one, itself repeated to fill up; D is the longest path's length.
        entrance: where its auxiliary nodes enter the target, if that is not the embedding.
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
    entrance: Entrance | None = None

    @property
    def nodes(self) -> int:
        """Return N: what the target reads, the root and the auxiliary nodes counted."""
        return self.tokens.shape[0]

    @property
    def drafted(self) -> int:
        """Return the number of draft tokens: C without the root."""
        return self.parents.shape[0] - 1

    @property
    def auxiliary(self) -> int:
        """Number of nodes that can never be accepted, P."""
        return self.nodes - self.parents.shape[0]

    @property
    def max_depth(self) -> int:
        """Return the length of the longest draft path; without ``routes``, wait for the device."""
        if self.routes is not None:
            return self.routes.shape[1] - 1
        return int(self.depth[: self.parents.shape[0]].max())

    @property
    def reach(self) -> int:
        """Depth of the deepest node, auxiliary nodes counted. (They make this wait.)"""
        return int(self.depth.max()) if self.auxiliary else self.max_depth

    @property
    def drafts(self) -> TokenTree:
        """Return the tree without its auxiliary nodes."""
        if not self.auxiliary:
            return self
        count = self.parents.shape[0]
        return replace(
            self,
            tokens=self.tokens[:count],
            depth=self.depth[:count],
            ancestors=self.ancestors[:count, :count],
            entrance=None,
        )

    def with_auxiliary(self, added: AuxiliaryNodes) -> TokenTree:
        """Return the tree with these nodes behind its own, which do not attend to them."""
        count = self.parents.shape[0]
        ancestors = torch.cat((self.ancestors.new_zeros(count, added.mask.shape[1]), added.mask))
        ancestors[:count, :count] = self.ancestors[:count, :count]
        return replace(
            self,
            tokens=torch.cat((self.tokens[:count], added.tokens)),
            depth=torch.cat((self.depth[:count], added.depth)),
            ancestors=ancestors,
            entrance=added.entrance,
        )


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Return who is whose ancestor: ``[N]`` parents (root first, -1) -> ``[N, N]`` bool.

    Row i is true at i and its ancestors. Every product doubles the number of steps that are
    followed, and nothing waits for the device.
    """
    nodes = parents.shape[0]
    reached = torch.eye(nodes, device=parents.device)
    later = torch.arange(1, nodes, device=parents.device)
    reached[later, parents[1:]] = 1.0
    for _ in range((nodes - 1).bit_length()):
        reached = (reached @ reached).clamp(max=1.0)
    return reached > 0


def listed_tree(
    root: Tensor, tokens: Sequence[int], parents: Sequence[int], log_q: Sequence[float]
) -> TokenTree:
    """Return a tree of chosen nodes that the host knows.

    Args:
        root: 0-d long, its token.
        tokens: of the nodes behind the root, parents before their children.
        parents: of these, 0 for the root.
        log_q: of these.
    """
    routes = [[0]]
    for node, parent in enumerate(parents, start=1):
        routes.append([*routes[parent], node])
    length, device = max(map(len, routes)), root.device
    above = torch.tensor([-1, *parents], device=device)
    return TokenTree(
        torch.cat((root.reshape(1), torch.tensor(tokens, dtype=torch.long, device=device))),
        above,
        torch.tensor([len(route) - 1 for route in routes], device=device),
        ancestor_matrix(above),
        "deterministic",
        torch.tensor([0.0, *log_q], device=device),
        routes=torch.tensor(
            [route + route[-1:] * (length - len(route)) for route in routes], device=device
        ),
    )
