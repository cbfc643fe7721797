"""From the root down, one decision per node: what every acceptance rule here has in common.

Shapes: A accepted draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from falcon_lab.protocols import Acceptance
from falcon_lab.trees.token_tree import TokenTree

Step = Callable[[int, list[int]], tuple[int | None, int]]
"""Node and its children, in order -> the child that is accepted (or None), and the token that
follows the node: the child's, or the correction."""


def walk(tree: TokenTree, step: Step) -> Acceptance:
    """Follow accepted children from the root until a node has none."""
    children: list[list[int]] = [[] for _ in range(tree.nodes)]
    for node, parent in enumerate(tree.parents.tolist()):
        if parent >= 0:
            children[parent].append(node)
    path = [0]
    while True:
        child, token = step(path[-1], children[path[-1]])
        if child is None:
            device = tree.tokens.device
            return Acceptance(torch.tensor(path, device=device), torch.tensor(token, device=device))
        path.append(child)
