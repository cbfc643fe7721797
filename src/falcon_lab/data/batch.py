"""One batch of packed documents.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Packed sequences (a named tuple, so that Lightning moves it between devices).

    Attributes:
        tokens: ``[B, T]`` long.
        loss_mask: ``[B, T]`` bool; whether token t is one that a model should learn to write
            (assistant tokens of a chat, every token of a text; never padding).
        documents: ``[B, T]`` long, document of each token; padding is -1.
        positions: ``[B, T]`` long, position in the document, 0-based.
        index: 0-d long, the optimiser-independent number of this batch in the run; seeds whatever
            is random about it.
        features: ``[B, T, H]`` teacher features from a feature store, or None.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    index: Tensor  # type: ignore[assignment]  # tuple.index is not wanted here
    features: Tensor | None = None
