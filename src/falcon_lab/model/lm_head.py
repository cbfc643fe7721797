"""The LM head of a target, and a copy of it to train.

Shapes: H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class LMHead(nn.Module):
    """Map features ``[..., H]`` to the model's own logits ``[..., V]``.

    Args:
        linear: the model's linear map.
        config: of the model.
    """

    def __init__(self, linear: nn.Module, config: Any) -> None:
        super().__init__()
        self.linear = linear
        self._config = config

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of features."""
        return final_logits(self.linear(features), self._config)


class HeadCopy(LMHead):
    """Begin as an LM head, in float32, and be trained.

    Args:
        head: the model's own, which stays as it is.
        config: of the model.
    """

    def __init__(self, head: nn.Module, config: Any) -> None:
        super().__init__(copy.deepcopy(head).float().requires_grad_(), config)


def final_logits(logits: Tensor, config: Any) -> Tensor:
    """Return the model's own logits ``[..., V]``, given those of the linear map.

    With the scale of Cohere (``logit_scale``) and Granite (``logits_scaling``) and the soft cap of
    Gemma 2 (``final_logit_softcapping``); loading a target checks that nothing else is missing.
    """
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits
