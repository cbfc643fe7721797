"""What makes a target of another one, by training weights of it.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TuningBatch:
    """Packed documents that a target is tuned on.

    Attributes:
        tokens: ``[B, T]`` long.
        loss_mask: ``[B, T]`` bool; whether a token counts in the loss (answers of a chat, all of a
            text).
        documents: ``[B, T]`` long, document of each token, which attends to that alone; padding is
            -1.
        positions: ``[B, T]`` long, position in the document, 0-based.
        generator: the source of all randomness of this step, on the CPU.
    """

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    generator: torch.Generator


class TargetTuner(ABC):
    """Makes a target of another one: says what is trained, and on what loss.

    Data, training loop, checkpoints and saving are falcon-lab's. One object tunes one model:
    ``begin`` is called first, then ``losses`` with every batch, and ``finish`` at the end. Where
    nothing is trained in between, what ``finish`` gives is a stand-in of the tuned target's shape.
    """

    __slots__ = ()

    @abstractmethod
    def begin(self, model: Any, tokenizer: Any) -> nn.Module:
        """Prepare a model and its tokenizer, in place.

        Args:
            model: a causal LM of Hugging Face's, frozen, in float32 where it is trained.
            tokenizer: its tokenizer, to which tokens may be added.

        Returns:
            A module whose weights with ``requires_grad`` are trained, and no others. Calling it
            again on a fresh copy of the same model gives the same names and shapes.

        Raises:
            FalconLabError: it cannot be tuned so.
        """

    @abstractmethod
    def losses(self, batch: TuningBatch) -> Mapping[str, tuple[Tensor, int]]:
        """Return the terms of the loss: the sum over some predictions, and how many they are.

        The loss is the sum of all sums over all predictions. Terms are what the curve shows.
        """

    @abstractmethod
    def finish(self) -> Any:
        """Return the tuned model: an ordinary one of Hugging Face's, without what was added to it.

        It is saved with the tokenizer that ``begin`` was given.
        """
