"""Chimera's published static tree."""

from __future__ import annotations

from falcon_lab.interfaces import BuildContext

CHILDREN = {
    "": 4,
    **{"0": 3, "1": 2, "2": 2, "3": 1},
    **{"00": 3, "01": 2, "02": 2, "10": 1},
    "000": 3,
    "0000": 2,
}
"""Children of every node that has any; a node's name is its ranks from the root on. 25 nodes of
depth 5 (``choices.py`` of the official code, which took EAGLE-1's)."""


def published_tree(config: None, context: BuildContext) -> dict[str, int]:
    """Return the tree in the form of the builder ``static``, as deep as the heads go."""
    deepest = context.reach(5)
    return {node: count for node, count in CHILDREN.items() if len(node) < deepest}
