"""The LM head of a target, and a copy of it to train.

Shapes: H hidden, V vocabulary, n tokens of a draft vocabulary.
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.model.packed import Packing, linear


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
        self._packing = Packing()

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of features."""
        head = self.linear
        if is_plain(head):
            (packed,) = self._packing([head.weight], features)
            if packed is not None:
                return final_logits(linear(features, head.weight, head.bias, packed), self._config)
        return final_logits(head(features), self._config)


class HeadCopy(LMHead):
    """Begin as an LM head, in float32, and be trained.

    Args:
        head: the model's own, which stays as it is.
        config: of the model.
        tokens: ``[n]`` long, whose rows it has; None: all.

    Raises:
        FalconLabError: some rows are asked for, and the head has none for every token.
    """

    def __init__(self, head: nn.Module, config: Any, tokens: Tensor | None = None) -> None:
        own = copy.deepcopy(head) if tokens is None else _linear(*rows_of(head, tokens))
        super().__init__(own.float().requires_grad_(), config)


class NarrowHead:
    """Some rows of an LM head, copied to lie together: ``[..., H]`` -> ``[..., n]``.

    It is no module: nothing of it is trained, saved, or sent to the other processes of a training.
    Its copies share the rows.

    Attributes:
        weight: ``[n, H]``.
        bias: ``[n]``, or None.

    Args:
        head: the model's own, which stays as it is.
        config: of the model.
        tokens: ``[n]`` long, where the rows are to be.

    Raises:
        FalconLabError: the head has no row for every token.
    """

    def __init__(self, head: nn.Module, config: Any, tokens: Tensor) -> None:
        self.weight, self.bias = rows_of(head, tokens)
        self._packing = Packing()
        self._config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> NarrowHead:
        return self

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits of features, in the precision of the rows."""
        features = features.to(self.weight.dtype)
        (packed,) = self._packing([self.weight], features)
        logits = linear(features, self.weight, self.bias, packed)
        return final_logits(logits, self._config)


def rows_of(head: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the weights ``[n, H]`` and biases ``[n]`` of some tokens, on the tokens' device.

    Raises:
        FalconLabError: the head is no plain linear map: it is quantised, adapted or hooked.
    """
    if not is_plain(head):
        hooked = type(head) is nn.Linear
        kind = f"{type(head).__name__} with hooks" if hooked else type(head).__name__
        raise FalconLabError(
            f"the target's LM head is a {kind}, of which single rows cannot be taken; set "
            "drafter.draft_vocabulary=null"
        )
    index, place = tokens.to(head.weight.device), tokens.device
    weight = head.weight.detach()[index].to(place)
    return weight, None if head.bias is None else head.bias.detach()[index].to(place)


def is_plain(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a head is a linear map and nothing more: not quantised, adapted or hooked."""
    return type(head) is nn.Linear and not (head._forward_hooks or head._forward_pre_hooks)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


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
