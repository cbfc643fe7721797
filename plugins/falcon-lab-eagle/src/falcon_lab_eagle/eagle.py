"""EAGLE's drafter: one token a pass, from the target's features and its own.

Shapes: H hidden.
"""

from __future__ import annotations

from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fuse
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.backbone import Backbone
from falcon_lab_eagle import EagleConfig


class EagleDrafter(FeatureHead):
    """Draft by a linear layer from 2H to H, and decoder blocks of the target's own kind.

    It regresses on the target's next feature, which the target's LM head reads (arXiv 2401.15077,
    §4.1). Falcon with a block of one and a linear fuse is the same.
    """

    def __init__(self, config: EagleConfig, context: BuildContext) -> None:
        host = context.host
        fuse = Fuse("linear", host.hidden_size, layers=1, dropout=0.0)
        blocks = Backbone.short(host.config, config.layers)
        vocabulary = context.draft_vocabulary(config.draft_vocabulary)
        super().__init__(host, fuse, blocks, block=1, vocabulary=vocabulary)
        self.config = config
