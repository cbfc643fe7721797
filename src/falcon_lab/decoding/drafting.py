"""The drafter's side of decoding: what it observes, and its auxiliary nodes.

Shapes: M committed positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Drafter, Observation, TreeBuilder
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.model.target import TargetOutput


def observation(
    drafter: Drafter,
    tokens: Tensor,
    output: TargetOutput,
    path: Tensor | None = None,
    *,
    remaining: int = 0,
) -> Observation:
    """Return the observation of positions, with what the drafter needs of them and no more.

    Args:
        drafter: whose needs hold.
        tokens: ``[M]`` long, what follows each position.
        output: the target's pass over them.
        path: ``[M]`` long, which of the tokens read they are; None: all of them.
        remaining: positions still to come before the drafter's turn.
    """
    features = output.features if "features" in drafter.needs else None
    parts = [
        states if states is None or path is None else states.index_select(0, path)
        for states in (features, output.taps)
    ]
    return Observation(tokens, parts[0], remaining, parts[1])


def with_auxiliary(
    drafter: Drafter, tree: TokenTree, max_depth: int, builder: TreeBuilder | None = None
) -> TokenTree:
    """Return a round's tree with the auxiliary nodes of its drafter, if it has any.

    Args:
        drafter: whose nodes they are.
        tree: of the round.
        max_depth: the greatest depth of such a node.
        builder: of the tree, which the cache was sized for; None: of any.

    Raises:
        FalconLabError: there are more of them than there is room for in the cache.
    """
    if not drafter.max_auxiliary:
        return tree
    added = drafter.auxiliary_nodes(tree, max_depth)
    if added is None:
        return tree
    most = drafter.max_auxiliary if builder is None else drafter.most_auxiliary(builder)
    if len(added.tokens) > most:
        raise FalconLabError(
            f"{type(drafter).__name__} has {len(added.tokens)} auxiliary nodes in a round and "
            f"max_auxiliary {most}; its max_auxiliary must be the most that there can be, or "
            "its most_auxiliary(tree) beside such a tree"
        )
    return tree.with_auxiliary(added)
