"""EAGLE-3's drafter: three layers of the target in place of its features, and no feature loss.

Shapes: B batch, T tokens, L tapped layers, H hidden, n tokens that it has logits of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from falcon_lab.drafters.feature_head import FeatureHead
from falcon_lab.drafters.fusing import Fusing
from falcon_lab.drafters.head_layers import Rows
from falcon_lab.interfaces import BuildContext, DrafterHost, Prediction
from falcon_lab.model.backbone import Backbone, fresh_attention
from falcon_lab.model.families import own_sizes
from falcon_lab_eagle import Eagle3Config


class Eagle3Drafter(FeatureHead):
    """Draft by a projection of tapped layers, and a decoder layer with 2H wide attention.

    A token of a true position is joined with a projection of the taps, in later passes with the
    layer's own output (arXiv 2503.01840, §3.1). Nothing regresses on the target's features, so
    train it with ``objective.feature: 0``, and over several passes with ``distillation.unroll``.
    """

    def __init__(self, config: Eagle3Config, context: BuildContext) -> None:
        host = context.host
        layer = WideLayer(
            layer_config(host, config), norm_before_residual=config.norm_before_residual
        )
        blocks = Backbone(layer, width=2 * host.hidden_size)
        own = config.head == "own"
        vocabulary = context.draft_vocabulary(config.draft_vocabulary, own_head=own)
        super().__init__(host, Fusing(), blocks, block=1, vocabulary=vocabulary)
        self.config = config
        self.needs = frozenset()
        layers = host.config.num_hidden_layers
        self.taps = default_taps(layers) if config.taps is None else tuple(config.taps)
        self.mix = nn.Linear(len(self.taps) * host.hidden_size, host.hidden_size, bias=False)
        self.norm = LlamaRMSNorm(host.hidden_size, eps=config.eps)
        self.head: nn.Linear | None = None
        if own:
            self.head = nn.Linear(host.hidden_size, (vocabulary or host).vocab_size, bias=False)

    def read(self, features: Tensor | None, taps: Tensor | None) -> Tensor:
        """Project ``[..., L, H]`` hidden states of the target to ``[..., H]``."""
        if taps is None:
            raise ValueError("EAGLE-3 reads layers of the target, and none was tapped")
        mixed: Tensor = self.mix(taps.flatten(-2).to(self.mix.weight.dtype))
        return mixed

    def join(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Join in the drafter's own precision, as no layer stands before the decoder layer."""
        dtype = self.mix.weight.dtype
        return torch.cat([self.host.embed(tokens).to(dtype), features.to(dtype)], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn ``[..., H]`` into ``[..., n]``, by the drafter's own LM head if it has one."""
        normed = self.norm(hidden)
        if self.head is None:
            return super().logits(normed)
        logits: Tensor = self.head(normed)
        return logits

    def predicted(self, hidden: Tensor, where: Rows) -> Prediction:
        """Predict tokens alone: the rows are no predictions of the target's features."""
        return Prediction(None, None, *where, hidden=hidden, head=lambda rows, _: self.logits(rows))


class WideLayer(nn.Module):
    """Run Llama's decoder layer with an attention that reads an embedding beside a hidden state.

    It is called like a base model of Hugging Face, and the same for every family of targets.

    Args:
        config: of the layer.
        norm_before_residual: the residual around the attention is the state behind its norm.
    """

    def __init__(self, config: LlamaConfig, *, norm_before_residual: bool = False) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self._norm_before_residual = norm_before_residual
        self.embedding_norm = LlamaRMSNorm(width, eps=eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.attention: Any = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.attention, name)
            setattr(self.attention, name, nn.Linear(2 * width, narrow.out_features, bias=False))
        self.mlp_norm = LlamaRMSNorm(width, eps=eps)
        self.mlp = LlamaMLP(config)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Any,
        position_ids: Tensor,
        past_key_values: Any = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Turn ``[B, T, 2H]``, embeddings and hidden states, into ``[B, T, H]``."""
        embedding, hidden = inputs_embeds.chunk(2, dim=-1)
        normed = self.hidden_norm(hidden)
        rows = torch.cat([self.embedding_norm(embedding), normed], dim=-1)
        attended = self.attention(
            hidden_states=rows,
            position_embeddings=self.rotary(rows, position_ids),
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )[0]
        hidden = (normed if self._norm_before_residual else hidden) + attended
        hidden = hidden + self.mlp(self.mlp_norm(hidden))
        return BaseModelOutputWithPast(last_hidden_state=hidden)


def default_taps(layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, as in the official code.

    Of a target with few layers they are the last three that can be tapped.
    """
    official = official_taps(layers)
    if 2 < official[1] < official[2]:
        return official
    return tuple(range(max(0, layers - 3), layers))


def official_taps(layers: int) -> tuple[int, int, int]:
    """Return the layers that the official code reads of a target, however few it has."""
    return 2, layers // 2, layers - 3


def layer_config(host: DrafterHost, options: Eagle3Config) -> LlamaConfig:
    """Return the configuration of Llama's layer in the target's sizes, or those of the options."""
    theirs = host.config
    sizes = own_sizes(theirs, options)
    config = LlamaConfig(
        vocab_size=1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=host.hidden_size,
        intermediate_size=sizes.inner,
        num_hidden_layers=1,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        head_dim=sizes.head,
        max_position_embeddings=host.max_positions,
        rms_norm_eps=options.eps,
        rope_parameters={"rope_type": "default", "rope_theta": options.rope_base},
    )
    config._attn_implementation = fresh_attention(theirs)
    return config
