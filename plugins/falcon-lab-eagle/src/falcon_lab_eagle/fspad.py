"""FSPAD's drafter: EAGLE's with feature sampling and partial alignment distillation.

Feature sampling lets the drawn token decide, by a gate, what of the fused input goes on. Partial
alignment gives every position two outputs: one that the LM head reads, and one that regresses on
the target's feature and is read by the next pass.

Shapes: B batch, T tokens, D sequences, L tokens of one, H hidden, I inner.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fuse, State
from falcon_lab.drafters.head_layers import Rows
from falcon_lab.interfaces import BuildContext, DrafterHost, Prediction
from falcon_lab.model.backbone import Backbone, fresh_attention
from falcon_lab.model.families import LayerSizes, short_config
from falcon_lab_eagle import Eagle3Config, FspadConfig
from falcon_lab_eagle.eagle3 import layer_config


class FspadDrafter(FeatureHead):
    """Draft as EAGLE-1 does, with both changes of FSPAD or one of them (arXiv 2408.15562).

    Without either it is EAGLE-1, bit for bit.
    """

    def __init__(self, config: FspadConfig, context: BuildContext) -> None:
        host = context.host
        width = host.hidden_size
        fuse = SamplingFuse(LayerSizes.of(host.config)) if config.sampling else _linear(width)
        if config.alignment:
            blocks = Backbone(AlignedLayers(host, config.layers), width=width)
        else:
            blocks = Backbone.short(host.config, config.layers)
        vocabulary = context.draft_vocabulary(config.draft_vocabulary)
        super().__init__(host, fuse, blocks, block=1, vocabulary=vocabulary)
        self.config = config

    def carried(self, hidden: Tensor) -> Tensor:
        """Return the half that regresses on the target's feature; whole where there are none."""
        return hidden[..., -self.host.hidden_size :]

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn the other half into logits by the target's LM head."""
        return super().logits(hidden[..., : self.host.hidden_size])

    def predicted(self, hidden: Tensor, where: Rows) -> Prediction:
        """Predict features by one half, and tokens by the other."""
        if not self.config.alignment:
            return super().predicted(hidden, where)
        said = hidden[..., : self.host.hidden_size]
        return Prediction(self.carried(hidden), None, *where, hidden=said)


def _linear(width: int) -> Fuse:
    return Fuse("linear", width, layers=1, dropout=0.0)


class SamplingFuse(Fuse):
    """Fuse linearly, and add an MLP of the fused input whose gate reads the token's embedding.

    Args:
        sizes: of the target's layers.
    """

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__("linear", sizes.hidden, layers=1, dropout=0.0)
        self.norm = LlamaRMSNorm(sizes.hidden)
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, state: State | None = None) -> tuple[Tensor, State | None]:
        """Fuse ``[D, L, 2H]``, embeddings first, into ``[D, L, H]``."""
        inputs = inputs.to(self.gate_proj.weight.dtype)
        fused = self.mix(inputs)
        gate = functional.silu(self.gate_proj(inputs[..., : self.hidden]))
        return fused + self.down_proj(gate * self.up_proj(self.norm(fused))), None


class AlignedLayers(nn.Module):
    """Run Llama's decoder layers, the last with an MLP that puts out 2H over a doubled residual.

    It is called like a base model of Hugging Face, and the same for every family of targets; the
    norm behind it is of the target's kind, and of either half.

    Args:
        host: the target.
        layers: how many.
    """

    def __init__(self, host: DrafterHost, layers: int) -> None:
        super().__init__()
        self.config = config = aligned_config(host, layers)
        self.layers: Any = nn.ModuleList(LlamaDecoderLayer(config, n) for n in range(layers))
        last: Any = self.layers[-1]
        down = last.mlp.down_proj
        last.mlp.down_proj = nn.Linear(down.in_features, 2 * down.out_features, bias=False)
        self.norm = Backbone.short(host.config, 1).final_norm
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        past_key_values: Any = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Turn ``[B, T, H]`` into ``[B, T, 2H]``: what is said, then what is carried on."""
        hidden = inputs_embeds
        given = {
            "position_embeddings": self.rotary(hidden, position_ids),
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
        }
        for layer in self.layers[:-1]:
            hidden = layer(hidden, **given)
        last = self.layers[-1]
        hidden = hidden + last.self_attn(hidden_states=last.input_layernorm(hidden), **given)[0]
        moved = last.mlp(last.post_attention_layernorm(hidden))
        both = torch.cat([hidden, hidden], dim=-1) + moved
        normed = self.norm(both.unflatten(-1, (2, -1))).flatten(-2)
        return BaseModelOutputWithPast(last_hidden_state=normed)


def aligned_config(host: DrafterHost, layers: int) -> LlamaConfig:
    """Return the configuration of the layers: the target's own where it is Llama's."""
    if not isinstance(host.config, LlamaConfig):
        config = layer_config(host, Eagle3Config())
        config.num_hidden_layers = layers
        return config
    own: LlamaConfig = short_config(host.config, layers)
    own._attn_implementation = fresh_attention(host.config)
    return own
