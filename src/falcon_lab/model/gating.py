"""Feed-forward networks that some tokens of a pass go through (``MlpGate``).

Shapes: n tokens, m of them that are chosen, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from falcon_lab.interfaces import MlpGate


def gated(
    gate: MlpGate, layer: int, hidden: Tensor, network: Callable[[Tensor | None], Tensor]
) -> Tensor:
    """Return what a layer's network adds, where the gate has tokens go through it.

    Args:
        gate: decides, and sees what came of it.
        layer: whose network it is, counted from 0.
        hidden: ``[n, H]``, what enters the residual block.
        network: ``[m]`` long, which tokens (None: all) -> ``[m, H]``, what is added to them.

    Returns:
        ``[n, H]``, zero where the network was left out.
    """
    wanted = gate.wanted(layer)
    if wanted is None:
        added = network(None)
    else:
        added, chosen = torch.zeros_like(hidden), wanted.nonzero()[:, 0]
        if len(chosen):
            added = added.index_copy(0, chosen, network(chosen))
    gate.seen(layer, hidden, hidden + added)
    return added
