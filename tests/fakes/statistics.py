"""Goodness of fit."""

from __future__ import annotations

import torch
from torch import Tensor


def chi_square(outcomes: Tensor, exact: Tensor) -> float:
    """p-value of ``[S, d]`` outcomes against the exact joint distribution ``[V] * d``.

    Cells with fewer than five expected outcomes are merged; an impossible outcome gives 0.
    """
    from scipy.stats import chisquare

    vocab, places = exact.shape[0], exact.dim()
    weights = torch.tensor([vocab ** (places - 1 - place) for place in range(places)])
    found = torch.bincount((outcomes * weights).sum(-1), minlength=exact.numel()).double()
    assert abs(float(exact.sum()) - 1) < 1e-5
    expected = exact.flatten().double() * outcomes.shape[0] / exact.sum()
    if bool(found[expected == 0].any()):
        return 0.0
    rare = expected < 5
    found = torch.cat((found[~rare], found[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    kept = expected > 0
    return float(chisquare(found[kept].numpy(), expected[kept].numpy()).pvalue)
