"""A copy of an LM head, to train.

Shapes: H hidden, V vocabulary.

What some families do to logits behind the linear map of their LM head.

Shapes: V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class HeadCopy(nn.Module):
    """``[..., H]`` -> ``[..., V]``: begins as an LM head, in float32, and can be trained.

    Args:
        head: the model's own, which stays as it is.
        config: of the model.
    """

    def __init__(self, head: nn.Module, config: Any) -> None:
        super().__init__()
        self.linear = copy.deepcopy(head).float().requires_grad_()
        self._config = config

    def forward(self, features: Tensor) -> Tensor:
        """Logits of features."""
        return final_logits(self.linear(features), self._config)


def final_logits(logits: Tensor, config: Any) -> Tensor:
    """``[..., V]`` of the linear map -> the model's own.

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
