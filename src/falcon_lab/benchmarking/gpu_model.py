"""Models of a given shape with random weights, made where they are to run: nothing is downloaded.

What a pass costs depends on shapes alone. What is written, and how much of it a drafter guesses,
depends on weights, and is never measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from falcon_lab.builtins import FalconConfig
from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.protocols import BuildContext
from falcon_lab.targets.target import Target


@dataclass(frozen=True)
class LlamaShape:
    """A Llama's shape; the defaults are Llama 2 7B's (arXiv 2307.09288), with room for a longer
    text."""

    vocabulary: int = 32_000
    hidden: int = 4096
    intermediate: int = 11_008
    layers: int = 32
    heads: int = 32
    groups: int = 32
    positions: int = 16_384


def random_target(
    shape: LlamaShape, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> Target:
    """A target of that shape, through the lean forward, with PyTorch's attention."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        max_position_embeddings=shape.positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Target(model, number_tokenizer(shape.vocabulary), name="random Llama", lean=True)


def random_drafter(target: Target, block: int, *, seed: int = 0) -> FalconDrafter:
    """Falcon's drafter with default options, where the target is and in its precision."""
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(seed)
        drafter = FalconDrafter(FalconConfig(block=block), BuildContext(target))
    return drafter.to(target.device, target.dtype).eval().requires_grad_(False)


def number_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are its tokens' numbers; none of them ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="0")
