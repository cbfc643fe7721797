"""Tiny random targets of every tested family, made in memory without any download."""

from __future__ import annotations

import string
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from falcon_lab.model.target import Target

FAMILIES: tuple[str, ...] = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "phi3",
    "olmo2",
)

WINDOW = 6
"""Of the families with sliding windows; shorter than the sequences that tests use."""

POSITIONS = 256
"""Of a tiny model, unless it is asked for others."""


def tiny_config(
    family: str,
    *,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    positions: int = POSITIONS,
) -> Any:
    """The configuration of a tiny model: 4 heads, grouped queries where the family has them."""
    shared = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": positions,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    grouped = shared | {"num_key_value_heads": 2}
    headed = grouped | {"head_dim": hidden // 4}
    if family == "llama":
        return transformers.LlamaConfig(**grouped)
    if family == "qwen2":
        return transformers.Qwen2Config(**grouped)
    if family == "qwen3":
        return transformers.Qwen3Config(**headed)
    if family == "mistral":
        return transformers.MistralConfig(**headed, sliding_window=WINDOW)
    if family == "gemma3":
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
        windows = {"sliding_window": WINDOW, "layer_types": kinds}
        return transformers.Gemma3TextConfig(**headed, **windows, query_pre_attn_scalar=hidden // 4)
    if family == "gpt2":
        del shared["intermediate_size"]  # which is four times the width, by another name
        return transformers.GPT2Config(**shared)
    if family == "gpt_neox":
        # transformers 5.0 reads no other share of rotary dimensions back from a saved file.
        return transformers.GPTNeoXConfig(**shared, rotary_pct=0.25)
    if family == "phi3":
        return transformers.Phi3Config(**grouped)
    if family == "olmo2":
        return transformers.Olmo2Config(**grouped)
    raise ValueError(f"no tiny model of family {family!r}; there are {', '.join(FAMILIES)}")


def tiny_model(family: str, *, seed: int = 0, **shape: int) -> PreTrainedModel:
    """A random float32 model in evaluation mode. Its weights are large, so that logits differ."""
    config = tiny_config(family, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """One token per character: id 0 is ``<eos>`` (and padding), id 1 ``<unk>``, then characters."""
    others = (chr(code) for code in range(0xA1, 0xA1 + vocab))
    common = " \n" + string.ascii_lowercase + string.digits + ".,:;'()=+-*/_"
    characters = dict.fromkeys([*common, *string.ascii_uppercase, *string.punctuation, *others])
    words = ["<eos>", "<unk>", *characters][:vocab]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )


def tiny_target(
    family: str = "llama", *, attention: str = "sdpa", vocab: int = 64, **shape: int
) -> Target:
    """A target in memory.

    Args:
        family: one of ``FAMILIES``.
        attention: Hugging Face's name of an implementation.
        vocab: V.
        shape: ``hidden``, ``layers``, ``positions`` and ``seed``, where they matter.
    """
    model = tiny_model(family, vocab=vocab, **shape)
    model.set_attn_implementation(attention)
    return Target(model, tiny_tokenizer(vocab), name=f"tiny-{family}")
