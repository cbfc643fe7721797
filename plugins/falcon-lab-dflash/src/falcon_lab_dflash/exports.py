"""DFlash as vLLM and SGLang read it.

Both number the layers that are read from 0: our tap i is their i - 1, and the embeddings have no
number. Both want a token that stands for what is to be drafted, whose embedding is the drafter's.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.export.mapping import (
    IDS,
    dtype_of,
    ids_of,
    plain_tables,
    renamed,
    reversed_names,
    sglang_command,
    token_ids,
    vllm_command,
    vocabulary_maps,
    without,
)
from falcon_lab.interfaces import Exported, ExportFormat, TrainedDrafter
from falcon_lab_dflash.drafter import spread
from falcon_lab_dflash.layers import Shape

MASK = "mask_embedding.pt"
"""The file from which engines take the mask's embedding; they read nothing else."""

PARTS = {
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Our parts of a layer -> the engines'."""


def dflash_names(layers: int) -> dict[str, str]:
    """Return our names of the weights but the mask, and the engines'."""
    inner = {
        f"model.layers.{i}.{ours}.weight": f"layers.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in PARTS.items()
    }
    return {
        "model.fuse.weight": "fc.weight",
        "model.fuse_norm.weight": "hidden_norm.weight",
        "model.norm.weight": "norm.weight",
        **inner,
    }


class DFlashFormat(ExportFormat):
    """What the engines' formats share."""

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names and configuration; the mask goes to a file of its own."""
        if drafter.config.causal:
            raise FalconLabError(
                "a drafter of causal=true cannot be exported: engines run DFlash's blocks both ways"
            )
        ours, host = dict(drafter.tensors), drafter.host
        mask, ids = ours.pop("mask"), ours.pop(IDS, None)
        tensors = renamed(ours, dflash_names(drafter.config.layers))
        tables, (sizes, base, eps) = plain_tables(host), Shape.of(host.config, drafter.config)
        drafted = host.vocab_size if ids is None else len(ids)
        if ids is not None:
            tensors["lm_head.weight"] = tables.head[ids]
            tensors |= vocabulary_maps(ids, host.vocab_size)
        token, layers = unused_token(host), drafter.config.layers
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": host.vocab_size,
            "draft_vocab_size": drafted,
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.inner,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.groups,
            "head_dim": sizes.head,
            "hidden_act": "silu",
            "rms_norm_eps": torch.finfo(torch.float32).eps if eps is None else eps,  # of nn.RMSNorm
            "rope_theta": base,
            "rope_parameters": {"rope_type": "default", "rope_theta": base},
            "max_position_embeddings": host.max_positions,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "block_size": drafter.config.block + 1,
            "num_target_layers": host.config.num_hidden_layers,
            "dflash_config": {"mask_token_id": token, "target_layer_ids": layer_ids(drafter)},
            "dtype": dtype_of(tensors),
            "torch_dtype": dtype_of(tensors),
            **token_ids(host.config),
        }
        content = io.BytesIO()
        torch.save({"embedding": mask.clone(), "mask_token_id": token}, content)
        return Exported(config, tensors, {MASK: content.getvalue()})

    def read(self, exported: Exported, drafter: TrainedDrafter) -> dict[str, Tensor]:
        """Map the names back."""
        tensors = without(exported.tensors, "lm_head.weight", "t2d")
        offsets = tensors.pop("d2t", None)
        ours = renamed(tensors, reversed_names(dflash_names(drafter.config.layers)))
        state = torch.load(io.BytesIO(exported.others[MASK]), weights_only=True)
        ours["mask"] = state["embedding"]
        if offsets is not None:
            ours[IDS] = ids_of(offsets)
        return ours


def layer_ids(drafter: TrainedDrafter) -> list[int]:
    """Return the layers that are read as the engines number them.

    Raises:
        FalconLabError: the embeddings are among them.
    """
    taps = list(drafter.config.taps) or list(spread(drafter.host.config.num_hidden_layers))
    if 0 in taps or sorted(taps) != taps:
        raise FalconLabError(
            f"the drafter reads the layers {taps}, and engines give ascending ones without the "
            "embeddings (0); train one with such drafter.taps"
        )
    return [tap - 1 for tap in taps]


def unused_token(host: Any) -> int:
    """Return a token that no text has: one that the tokenizer lacks, or its mask or padding.

    Raises:
        FalconLabError: there is none.
    """
    known = len(host.tokenizer)
    if known < host.vocab_size:
        return int(host.vocab_size) - 1
    for name in ("mask", "pad", "unk"):
        token = getattr(host.tokenizer, f"{name}_token_id", None)
        used = {*host.eos_ids, host.tokenizer.bos_token_id}
        if token is not None and token not in used:
            return int(token)
    raise FalconLabError(
        f"engines take a token that no text has for what is to be drafted, and the tokenizer of "
        f"{host.name} has neither a mask nor a padding token of its own; give it one"
    )


class DFlashVllm(DFlashFormat):
    """DFlash for vLLM's ``DFlashQwen3ForCausalLM``."""

    engines = "vLLM (0.32 and 0.33)"
    tags = ("dflash", "vllm")

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line; a pass drafts a block."""
        return vllm_command(folder, drafter.place, "dflash", drafter.config.block)


class DFlashSglang(DFlashFormat):
    """DFlash for SGLang's ``DFlashDraftModel``, which drafts over all tokens alone."""

    engines = "SGLang (0.5.23)"
    tags = ("dflash", "sglang")

    def write(self, drafter: TrainedDrafter) -> Exported:
        """Map names and configuration."""
        if drafter.config.draft_vocabulary is not None:
            raise FalconLabError(
                "SGLang's DFlash has no draft vocabulary; train one with "
                "drafter.draft_vocabulary=null"
            )
        return super().write(drafter)

    def serving(self, folder: str, drafter: TrainedDrafter) -> str:
        """Return the command line."""
        return sglang_command(folder, drafter.place, "DFLASH")
