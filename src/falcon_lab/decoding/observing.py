"""What a drafter is told of positions that the target has read.

Shapes: n rows of a target pass, M committed positions.

Nodes that are verified and never accepted: a drafter's questions to the target.

Shapes: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, cast

from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Acceptance, Drafter, Observation, ReadsProbes
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
    """The observation of positions, with what the drafter needs of them and no more.

    Args:
        drafter: who is told.
        tokens: ``[M]`` long, what follows each position.
        output: the target's pass over them.
        path: ``[M]`` long, its rows that are the positions; None: all of them.
        remaining: positions still to come before the drafter's turn.
    """
    features = output.features if "features" in drafter.needs else None
    parts = [
        rows if rows is None or path is None else rows.index_select(0, path)
        for rows in (features, output.taps)
    ]
    return Observation(tokens, parts[0], remaining, parts[1])


@cache
def _probes(kind: type) -> bool:
    """Whether drafters of a class read probes; asked every round."""
    return hasattr(kind, "probe") and hasattr(kind, "harvest")


def most_probes(drafter: Drafter) -> int:
    """Cache rows that a round takes beyond its tree."""
    return cast(ReadsProbes, drafter).max_probes if _probes(type(drafter)) else 0


def with_probes(drafter: Drafter, tree: TokenTree, room: int) -> TokenTree:
    """A round's tree with what its drafter wants to know besides.

    Raises:
        FalconLabError: there are more probes than there is room for in the cache.
    """
    if not _probes(type(drafter)):
        return tree
    asking = cast(ReadsProbes, drafter)
    probes = asking.probe(tree, room)
    if probes is None:
        return tree
    if len(probes.tokens) > asking.max_probes:
        raise FalconLabError(
            f"{type(drafter).__name__} has {len(probes.tokens)} probes in a round and max_probes "
            f"{asking.max_probes}; its max_probes must be the most that there can be"
        )
    return tree.with_probes(probes)


def harvest(drafter: Drafter, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
    """Tell the drafter what the target said, ``[N, V]``, if it has asked anything."""
    if tree.probes:
        cast(ReadsProbes, drafter).harvest(tree, logits, acceptance)
