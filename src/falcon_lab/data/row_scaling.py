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
    """How far rows are from the exact ones.

    A row's is the length of the error over that of the row, so that a few large rows do not hide
    the others.

    Attributes:
        squares: of these, summed.
        rows: that were compared.
    """

    squares: float = 0.0
    rows: int = 0

    @classmethod
    def of(cls, values: Tensor, exact: Tensor) -> Deviation:
        """Compare ``[..., n]`` with what it should be."""
        exact = exact.double()
        error = (values.double() - exact).square().sum(-1)
        whole = exact.square().sum(-1)
        return cls(float((error / whole.where(whole > 0, 1.0)).sum()), whole.numel())

    def __add__(self, other: Deviation) -> Deviation:
        return Deviation(self.squares + other.squares, self.rows + other.rows)

    @property
    def root_mean_square(self) -> float:
        """Return that of all rows."""
        return (self.squares / self.rows) ** 0.5 if self.rows else 0.0
