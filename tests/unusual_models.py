"""Tiny targets of families that differ from the others in what their layers are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from falcon_lab.model.target import Target
from tiny_models import tiny_tokenizer

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
HEADS_BY_KIND = {
    "head_dim": 8,
    "global_head_dim": 16,  # of full attention
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        EXPERTS | LATENT | ROUTED | {"num_key_value_heads": 4, "v_head_dim": 8},
    ),
    "falcon": ("FalconConfig", {"alibi": False, "new_decoder_architecture": True}),
    "gemma4": ("Gemma4TextConfig", HEADS_BY_KIND),
    "bloom": ("BloomConfig", {"n_head": 4, "n_layer": 2}),
    "moshi": ("MoshiConfig", {"ffn_dim": 64, "head_dim": 8, "sliding_window": 256}),
}
"""Family -> its configuration's class and what stands in it beside ``SHAPE``."""


def unusual_config(family: str, **changes: Any) -> Any:
    """A tiny model's configuration."""
    name, own = CONFIGURATIONS[family]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**(SHAPE | own | changes))


def unusual_target(family: str, **changes: Any) -> Target:
    """A random float32 target with large weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            unusual_config(family, **changes), dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return Target(model.eval(), tiny_tokenizer(), name=f"tiny-{family}")
