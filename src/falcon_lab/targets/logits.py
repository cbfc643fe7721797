"""What some families do to logits behind the linear map of their LM head.

Shapes: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
