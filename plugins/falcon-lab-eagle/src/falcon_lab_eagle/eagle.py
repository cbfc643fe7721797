"""EAGLE's drafter: one token a pass, from the target's features and its own.

Shapes: H hidden.
"""

from __future__ import annotations

from typing import Any

from torch import nn

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
        published = config.form == "published"
        bias = not published if config.bias is None else config.bias
        if not bias:
            fuse.mix = nn.Linear(2 * host.hidden_size, host.hidden_size, bias=False)
        if published:
            blocks = bare(blocks, host.hidden_size)
        vocabulary = context.draft_vocabulary(config.draft_vocabulary)
        super().__init__(host, fuse, blocks, block=1, vocabulary=vocabulary)
        self.config = config


def bare(blocks: Backbone, hidden: int) -> Backbone:
    """Return decoder blocks without the first one's input norm and without a final norm.

    Raises:
        ValueError: the family calls them otherwise, or has none.
    """
    base: Any = blocks.base
    layer: Any = base.layers[0] if hasattr(base, "layers") else None
    if not hasattr(layer, "input_layernorm") or not hasattr(base, "norm"):
        raise ValueError(
            f"form is published, and blocks of {base.config.model_type} have no norms to leave "
            "out; set form=full"
        )
    layer.input_layernorm, base.norm = nn.Identity(), nn.Identity()
    return Backbone(base, lean=True, width=hidden)
