"""Goodness of fit, without scipy.

Shapes: S samples, d tokens of each, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNLIKELY = 1e-5
"""A fit that is worse than this by chance is taken for a fault."""


OFTEN = 5
"""Outcomes of a cell that are expected at least, for it to count by itself."""


def common(exact: Tensor, samples: int) -> Tensor:
    """Which cells of ``[V] * d`` count by themselves, of so many samples."""
    return exact.double() / exact.double().sum() * samples >= OFTEN


def chi_square(outcomes: Tensor, exact: Tensor) -> float:
    """p-value of ``[S, d]`` tokens against their exact joint distribution, ``[V] * d``.

    Cells with fewer than ``OFTEN`` expected outcomes are merged; an impossible outcome gives 0.
    """
    vocabulary, places = exact.shape[0], exact.dim()
    weights = torch.tensor([vocabulary ** (places - 1 - place) for place in range(places)])
    found = torch.bincount((outcomes * weights).sum(-1), minlength=exact.numel()).double()
    expected = exact.flatten().double()
    expected = expected / expected.sum() * outcomes.shape[0]
    if bool(found[expected == 0].any()):
        return 0.0
    rare = ~common(exact, len(outcomes)).flatten()
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    found, expected = found[expected > 0], expected[expected > 0]
    statistic = ((found - expected).square() / expected).sum()
    freedom = max(1, len(expected) - 1)
    # The chi-square distribution's upper tail is a regularised incomplete gamma function.
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2))
