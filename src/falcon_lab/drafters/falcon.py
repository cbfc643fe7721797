"""Falcon's drafter: a semi-autoregressive head that predicts k tokens a pass.

arXiv 2412.12639, §3.1-3.2. Input t is (x_{t+1}, h_t), fused over time and sent through decoder
blocks of the target's own kind under the relaxed causal mask; its output regresses on h_{t+k}.

Shapes: k block, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fuse
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.backbone import Backbone

if TYPE_CHECKING:
    from falcon_lab.drafters.tapped_features import TappedFeatures
    from falcon_lab.plugins.builtins import FalconConfig


class FalconDrafter(FeatureHead):
    """The drafter of ``FalconConfig``: a ``FeatureHead`` of the target's own decoder blocks."""

    def __init__(self, config: FalconConfig, context: BuildContext) -> None:
        width = context.host.hidden_size
        fuse = Fuse(config.fuse, width, layers=config.lstm_layers, dropout=config.dropout)
        backbone = Backbone.short(context.host.config, config.layers)
        offsets: nn.Parameter | None = None
        maps: nn.Parameter | None = None
        if config.query != "block":
            offsets = nn.Parameter(0.02 * torch.randn(config.block, width))
        if config.query == "mapped":
            maps = nn.Parameter(torch.eye(width).repeat(config.block, 1, 1))
        super().__init__(
            context.host,
            fuse,
            backbone,
            block=config.block,
            aligned=config.phase == "aligned",
            offsets=offsets,
            maps=maps,
            tapped=_tapped(config, width),
            vocabulary=context.draft_vocabulary(config.draft_vocabulary),
        )
        self.config = config
        if config.taps:  # else a subclass may have its own
            self.taps = tuple(config.taps)


def _tapped(config: FalconConfig, width: int) -> TappedFeatures | None:
    """Return what mixes the layers that are tapped with features, if any are."""
    if not config.taps:
        return None
    from falcon_lab.drafters.tapped_features import TappedFeatures  # without taps none needs it

    return TappedFeatures(len(config.taps), width)
