"""The target's features mixed with hidden states of layers below, for a head that reads features.

The last layer's state is made for the next token alone; those in the middle know more of the text
(EAGLE-3, arXiv 2503.01840, §3.1, reads three in place of features). Here they are mixed with the
feature, and the head goes on predicting features: in a later pass of a round, of whose tokens
there are no such states, a linear map of the predicted feature stands for the mixture.

Shapes: L tapped layers, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALLEST = 1e-6
"""Mean square of a state below which it is not made larger."""


class TappedFeatures(nn.Module):
    """Mix features with tapped hidden states, and say what stands for the mixture later.

    Attributes:
        mix: ``[(1 + L)·H -> H]``, of what ``sources`` returns.
        expected: ``[H -> H]``, from a predicted feature to the mixture that goes with it; the
            identity at first.

    Args:
        layers: L.
        width: H.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear((1 + layers) * width, width, bias=False)
        self.expected = nn.Linear(width, width)
        with torch.no_grad():
            nn.init.eye_(self.mix.weight)  # at first the mixture is the feature
            nn.init.eye_(self.expected.weight)
            nn.init.zeros_(self.expected.bias)

    def sources(self, features: Tensor, taps: Tensor) -> Tensor:
        """Return what is mixed: the feature and the tapped states, each of unit mean square.

        Args:
            features: ``[..., H]``.
            taps: ``[..., L, H]``.

        Returns:
            ``[..., (1 + L)·H]``.
        """
        states, dtype = taps.float(), self.mix.weight.dtype
        size = states.square().mean(-1, keepdim=True).clamp_min(SMALLEST).rsqrt()
        return torch.cat([features.to(dtype), (states * size).to(dtype).flatten(-2)], dim=-1)

    def forward(self, features: Tensor, taps: Tensor) -> Tensor:
        """Return the mixture, ``[..., H]``."""
        mixture: Tensor = self.mix(self.sources(features, taps))
        return mixture
