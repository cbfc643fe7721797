"""A copy of an LM head, to train.

Shapes: H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from falcon_lab.targets.logits import final_logits


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
