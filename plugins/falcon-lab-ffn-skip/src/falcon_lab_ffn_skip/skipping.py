"""FFN-SkipLLM (arXiv 2404.03865): a token whose hidden state has settled skips what follows.

Feed-forward networks change hidden states less and less on the way up, but for the lowest and the
highest layers, the "cold" regions. Between these a token goes through the networks until one of
them leaves its hidden state all but as it was; from then on it skips them, up to the cold region at
the top. Attention always runs, so that keys and values are complete.

Shapes: n tokens of a pass, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.decoding.plain import PartEngine
from falcon_lab.drafters.self_drafting import SelfDrafter
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, EngineContext, LayerPlan
from falcon_lab_ffn_skip import FfnSkipConfig


class Saturation:
    """The ``MlpGate`` of the paper: by the cosine of a token's states around the networks.

    Attributes:
        asked: networks that tokens came to.
        skipped: of them those that were left out.

    Args:
        config: the options.
        layers: that the model has.

    Raises:
        FalconLabError: the cold regions leave nothing to skip.
    """

    def __init__(self, config: FfnSkipConfig, layers: int) -> None:
        first = layers // 4 if config.first is None else config.first
        last = max(1, layers // 10) if config.last is None else config.last
        if first + last >= layers:
            raise FalconLabError(
                f"first is {first} and last {last}, and the target has {layers} layers: nothing "
                "is left to skip; make them smaller"
            )
        self.hot = range(first, layers - last)
        self._threshold, self._warmup = config.threshold, config.warmup
        self._warm = self._saturated = torch.empty(0, dtype=torch.bool)  # [n]
        self.asked = self.skipped = 0

    @property
    def share(self) -> float:
        """Return the share of networks that were left out so far."""
        return self.skipped / self.asked if self.asked else 0.0

    def begin(self, positions: Tensor) -> None:
        """Begin a pass: no token is saturated, and those of the warm-up never will be."""
        self._warm = positions < self._warmup
        self._saturated = torch.zeros_like(self._warm)

    def wanted(self, layer: int) -> Tensor | None:
        """Return the tokens that are not saturated; None in the cold regions."""
        self.asked += len(self._warm)
        if layer not in self.hot:
            return None
        self.skipped += int(self._saturated.sum())
        return ~self._saturated

    def seen(self, layer: int, before: Tensor, after: Tensor) -> None:
        """Note the tokens whose hidden states a hot layer's network has left as they were."""
        if layer in self.hot:
            alike = functional.cosine_similarity(before.float(), after.float(), dim=-1)
            self._saturated |= (alike >= self._threshold) & ~self._warm


def plan_of(config: FfnSkipConfig, layers: int) -> LayerPlan:
    """Return the plan of passes in which tokens skip networks when they are saturated."""
    return LayerPlan(gate=Saturation(config, layers))


def ffn_skip(config: FfnSkipConfig, context: EngineContext) -> PartEngine:
    """Return plain decoding that skips networks: it is lossy."""
    layers = context.target.config.num_hidden_layers
    return PartEngine(context.target, plan_of(config, layers), decoding=context.decoding)


class FfnSkipDrafter(SelfDrafter):
    """Draft with the target itself, but for the networks that its tokens skip.

    Args:
        config: the options.
        context: gives the target.
    """

    def __init__(self, config: FfnSkipConfig, context: BuildContext) -> None:
        super().__init__(context.host)
        self._plan = plan_of(config, context.host.config.num_hidden_layers)

    @property
    def plan(self) -> LayerPlan:
        """Return the plan with its gate."""
        return self._plan
