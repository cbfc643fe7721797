"""Whole paths, as a drafter has found them, joined where they begin alike.

Shapes: C nodes of the tree (the root counted), D length of its longest path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from falcon_lab.builtins import PathsTreeConfig
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import BuildContext, DraftOutput, Frontier, RoundContext
from falcon_lab.trees.token_tree import TokenTree, ancestor_matrix


class PathsTree:
    """A ``TreeBuilder`` for drafters that look text up: one pass, and its paths are the tree.

    Nodes are deterministic: whoever looks up knows no probabilities, and at T > 0 a token is
    accepted with the target's own (one-hot) rule.

    Args:
        config: the size.
        context: not needed.
    """

    def __init__(self, config: PathsTreeConfig, context: BuildContext) -> None:
        del context
        self.max_depth = config.depth
        self.max_nodes = config.nodes + 1

    def start(self, context: RoundContext) -> Frontier | None:
        """Begin a round within ``context.budget``."""
        self._root = context.root
        self._depth, self._nodes = context.budget.limit(
            depth=self.max_depth, nodes=self.max_nodes - 1, block=self.max_depth
        )
        self._tokens: list[int] = []  # of the drafts: node i is entry i - 1
        self._routes: list[list[int]] = [[0]]  # nodes from the root to each one
        if self._depth < 1 or self._nodes < 1:
            return None
        return Frontier.root(context.root.device)

    def grow(self, output: DraftOutput) -> None:
        """Take the paths in.

        Raises:
            FalconLabError: the drafter never has any.
        """
        if output.paths is None:
            raise FalconLabError(
                "tree 'paths' is made of the paths that a drafter has found, and this one predicts "
                "tokens instead; choose chain, static, dynamic or optimal"
            )
        children: dict[tuple[int, int], int] = {}
        for path in output.paths:
            self._add(path, children)

    def finish(self) -> TokenTree:
        """The paths, those with a common beginning joined."""
        device = self._root.device
        deepest = max(len(route) for route in self._routes)
        parents = torch.tensor([-1, *(route[-2] for route in self._routes[1:])], device=device)
        drafts = torch.tensor(self._tokens, dtype=torch.long, device=device)
        filled = [route + route[-1:] * (deepest - len(route)) for route in self._routes]
        return TokenTree(
            torch.cat((self._root.reshape(1), drafts)),
            parents,
            torch.tensor([len(route) - 1 for route in self._routes], device=device),
            ancestor_matrix(parents),
            "deterministic",
            torch.zeros(len(self._routes), device=device),
            routes=torch.tensor(filled, device=device),
        )

    def _add(self, path: Sequence[int], children: dict[tuple[int, int], int]) -> None:
        """Add what is new of a path; ``children`` are the nodes by parent and token."""
        node = 0
        for token in path[: self._depth]:
            known = children.get((node, token))
            if known is None:
                if len(self._tokens) == self._nodes:
                    return
                self._tokens.append(token)
                known = children[node, token] = len(self._tokens)
                self._routes.append([*self._routes[node], known])
            node = known
