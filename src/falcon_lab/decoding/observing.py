"""What a drafter is told of positions that the target has read.

Shapes: n rows of a target pass, M committed positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from falcon_lab.protocols import Drafter, Observation

if TYPE_CHECKING:
    from falcon_lab.targets.target import TargetOutput


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
