"""Hidden states of layers in the middle of a target, for drafters that read them (EAGLE-3, DFlash).

Layer 0 is what the first decoder layer reads (the embeddings), layer i is what decoder layer i puts
out, counted from 1. What the last one puts out are the target's features, after its final norm.

Shapes: B batch, T new rows, L tapped layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import TapsLayers

if TYPE_CHECKING:
    from falcon_lab.model.backbone import Backbone
    from falcon_lab.model.target import Target

NOT_STORED = (
    "data.feature_store keeps the target's features, and this drafter also reads hidden states of "
    "its layers; set data.feature_store=null to compute both on line"
)


class Taps:
    """Keeps the hidden states of some layers while a pass goes through all of them.

    Args:
        layers: which.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._seen: dict[int, Tensor] = {}

    def see(self, layer: int, rows: Tensor) -> None:
        """Keep ``[B, T, H]`` if the layer is one of those wanted."""
        if layer in self.layers:
            self._seen[layer] = rows

    def see_all(self, states: Sequence[Tensor] | None, count: int) -> None:
        """Keep those wanted of a Hugging Face model's ``hidden_states``.

        Args:
            states: of every layer, the embeddings first.
            count: decoder layers of the model.
        """
        if states is None or len(states) != count + 1:
            raise FalconLabError(
                "the target's model does not tell the hidden states of its layers, which this "
                "drafter reads; choose another target or another drafter"
            )
        for layer in self.layers:
            self._seen[layer] = states[layer]

    def stacked(self) -> Tensor:
        """``[B, T, L, H]``, in the order of ``layers``."""
        return torch.stack([self._seen[layer] for layer in self.layers], dim=-2)


def tapped_pass(backbone: Backbone, layers: Sequence[int], **rows: Any) -> tuple[Tensor, ...]:
    """A pass of a backbone.

    Returns:
        Hidden states ``[B, T, H]`` and, unless ``layers`` is empty, ``[B, T, L, H]``.
    """
    if not layers:
        return (backbone(**rows),)
    taps = Taps(layers)
    return backbone(**rows, taps=taps), taps.stacked()


def tapped_for(target: Target, drafter: object) -> Target:
    """The target as a drafter reads it: tapped where the drafter asks for it, else as it is."""
    layers = layers_of(drafter)
    return target.tapped(layers) if layers else target


def layers_of(drafter: object) -> tuple[int, ...]:
    """The layers that a drafter taps."""
    return tuple(drafter.taps) if isinstance(drafter, TapsLayers) else ()


def checked_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Layers that can be tapped, of a target with ``count`` of them.

    Raises:
        FalconLabError: one cannot, or is there twice.
    """
    if len(set(layers)) < len(layers):
        raise FalconLabError(f"the drafter taps a layer twice: {list(layers)}")
    if wrong := [layer for layer in layers if not 0 <= layer < count]:
        raise FalconLabError(
            f"the drafter taps layer {wrong[0]}, and the target has the layers 0 (embeddings) to "
            f"{count - 1}; what its last layer puts out are its features"
        )
    return tuple(layers)
