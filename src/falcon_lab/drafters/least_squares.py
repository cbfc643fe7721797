"""A linear regression over documents that come in parts, for the first weights of a drafter.

Shapes: B batch, T positions, n rows, C channels of an input, K of an outcome.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RIDGE = 1e-4
"""Of the mean squared channel, added to every one: as many channels may be nearly the same."""


def within(documents: Tensor, ahead: int) -> Tensor:
    """Return which positions have the position so many further on in their own document.

    Args:
        documents: ``[B, T]`` long, document of each position; padding is negative.
        ahead: how many positions further on.

    Returns:
        ``[B, max(0, T - ahead)]`` bool.
    """
    here = documents[:, : max(0, documents.shape[1] - ahead)]
    return (here == documents[:, ahead:]) & (here >= 0)


class LeastSquares:
    """The moments that a regression needs, in float64.

    Attributes:
        count: n, of all rows.
        given: ``[C, C]``, products of the inputs with themselves; with an intercept
            ``[C + 1, C + 1]``, as if the last channel were a one.

    Args:
        intercept: whether the outcomes have one.
    """

    def __init__(self, *, intercept: bool = True) -> None:
        self.count = 0
        self.given: Any = 0.0
        self._both: Any = 0.0  # and with the outcomes
        self._ones = int(intercept)

    def add(self, inputs: Tensor, outcomes: Tensor, weights: Tensor | None = None) -> None:
        """Add ``[n, C]`` inputs and ``[n, …]`` outcomes of K channels in all.

        Args:
            inputs: what is given.
            outcomes: what is to follow from it.
            weights: ``[n]`` of the squared errors; None: all alike.
        """
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), self._ones)], dim=1).float()
        weighted = inputs if weights is None else inputs * weights[:, None]
        self.count += len(inputs)
        self.given = self.given + (weighted.T @ inputs).double()
        self._both = self._both + (weighted.T @ outcomes.flatten(1).float()).double()

    def solve(self) -> tuple[Tensor, Tensor]:
        """Return the map ``[C, K]`` and the intercept ``[1, K]``, or ``[0, K]`` without one.

        There must have been a row.
        """
        return solved(self.given, self._both, intercept=bool(self._ones))


def solved(given: Tensor, both: Tensor, *, intercept: bool) -> tuple[Tensor, Tensor]:
    """Return the map ``[C, K]`` and the intercept ``[1, K]``, or ``[0, K]`` without one.

    Args:
        given: products of the inputs with themselves; an intercept's one is the last of them.
        both: products of the inputs with the outcomes, as many rows.
        intercept: whether there is one.
    """
    channels = len(given) - int(intercept)
    ridges = torch.zeros_like(given.diagonal())
    ridges[:channels] = RIDGE * given.diagonal()[:channels].mean()
    solution = torch.linalg.solve(given + ridges.diag(), both)
    return solution[:channels], solution[channels:]
