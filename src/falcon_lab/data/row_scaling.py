"""Numbers kept in fewer bits, each row of them with a scale of its own.

A row's largest value becomes the largest that the smaller dtype has, so that neither the outliers
of one position nor the size of a layer's states decide how finely the others are kept.

Shapes: n values of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def scaled(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``[..., n]`` in ``dtype`` and ``[...]`` float32, what each row was divided by."""
    exact = values.float()
    largest = torch.finfo(dtype).max
    scale = exact.abs().amax(-1) / largest
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (exact / scale[..., None]).clamp(-largest, largest).to(dtype), scale


def unscaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[..., n]`` in ``dtype``: what ``scaled`` was given, rounded."""
    return (values.float() * scale[..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Deviation:
    """Squares of errors and of the exact values, summed."""

    error: float = 0.0
    exact: float = 0.0

    @classmethod
    def of(cls, values: Tensor, exact: Tensor) -> Deviation:
        """Compare values with what they should be."""
        difference = values.double() - exact.double()
        return cls(float(difference.square().sum()), float(exact.double().square().sum()))

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(self.error + other.error, self.exact + other.exact)

    @property
    def relative(self) -> float:
        """Return the root of the squared errors over that of the squares."""
        return (self.error / self.exact) ** 0.5 if self.exact else 0.0
