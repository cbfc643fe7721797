"""Tiny GGUF files, written by the package ``gguf`` itself, and what their weights are."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from falcon_lab.data.encoding import train_tokenizer
from falcon_lab.model.gguf import OLDEST
from tiny_models import tiny_model

gguf = pytest.importorskip("gguf", reason="writes the GGUF files; pip install gguf")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
if tuple(map(int, version("transformers").split(".")[:2])) < OLDEST:
    pytest.skip("this transformers reads other tokenizers from GGUF files", allow_module_level=True)

TEXTS = ["def add(first, second):\n    return first + second\n", "The answer is 42, isn't it?\n"]
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def _can(does: Callable[[Any], Any]) -> tuple[str, ...]:
    """Names of the types of numbers with which the package does something."""
    found = []
    for kind in gguf.GGML_QUANT_SIZES:
        with suppress(NotImplementedError):
            does(kind)
            found.append(kind.name)
    return tuple(found)


ROW = 256
"""Numbers that are whole blocks of every type."""
KINDS = _can(lambda kind: gguf.quantize(np.zeros((1, ROW), np.float32), kind))
"""Types that the package can write; transformers reads with its ``dequantize``."""
OTHERS = tuple(
    name
    for name in _can(
        lambda kind: gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    )
    if name not in KINDS
)
"""Types that it can read, and not write."""

HEADS, GROUPS, WIDTH = 4, 2, 128

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of a Llama's modules -> GGUF's."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 280 entries."""
    return train_tokenizer(TEXTS * 5, 280)


def model(layers: int = 2) -> Any:
    """A Llama of layers × 128 whose head is not the embeddings."""
    return tiny_model("llama", vocab=len(tokenizer()), hidden=WIDTH, layers=layers)


def gguf_name(name: str) -> str:
    """GGUF's name of a parameter."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name.replace("model.layers.", "blk.")


def rotated(name: str, weight: np.ndarray) -> np.ndarray:
    """Queries and keys with the halves of a head interleaved, as GGUF's Llamas have them."""
    if "attn_q." not in name and "attn_k." not in name:
        return weight
    heads = HEADS if "attn_q." in name else GROUPS
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def write_gguf(
    path: Path,
    kind: str | Sequence[str] = "Q8_0",
    change: Callable[[Any], None] = lambda writer: None,
) -> Any:
    """Write the model in a quantisation, as far as its rows are long enough for it.

    Args:
        path: of the file.
        kind: of all weights, or of those of each layer; the weights are such as come of any bytes
            where it is none of ``KINDS``.
        change: may add to the ``GGUFWriter``.

    Returns:
        The model with the weights that the file stands for.
    """
    of_layers = [] if isinstance(kind, str) else kind
    written, words = model(len(of_layers) or 2), tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, words, len(of_layers) or 2)
    change(writer)
    state = {}
    for name, weight in written.state_dict().items():
        ours = gguf_name(name)
        wanted = kind if isinstance(kind, str) else _of_layer(ours, kind)
        number = gguf.GGMLQuantizationType[wanted]
        if weight.dim() == 1 or weight.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
            number = gguf.GGMLQuantizationType.F32
        packed = _packed(rotated(ours, weight.numpy()), number)
        writer.add_tensor(ours, packed, raw_dtype=number)
        state[name] = _restored(ours, gguf.dequantize(packed, number), weight.shape)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    written.load_state_dict(state)
    return written


def _of_layer(name: str, kinds: Sequence[str]) -> str:
    """The kind of a tensor's layer; what is of no layer is not quantised."""
    return kinds[int(name.split(".")[1])] if name.startswith("blk.") else "F32"


def _packed(values: np.ndarray, kind: Any) -> np.ndarray:
    """The blocks of weights, or any that stand for finite numbers."""
    if kind.name in KINDS:
        return gguf.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draws = np.random.default_rng(0)
    shape = (values.shape[0], values.shape[1] // block * size)
    return draws.integers(0, SMALL, shape, np.uint8)


SMALL = 0x2C
"""Of two bytes below this one every half-precision number is smaller than 0.1."""


def _restored(name: str, values: np.ndarray, shape: torch.Size) -> torch.Tensor:
    values = np.array(values, dtype=np.float32).reshape(shape)
    if "attn_q." in name or "attn_k." in name:
        heads = HEADS if "attn_q." in name else GROUPS
        values = values.reshape(heads, -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
    return torch.from_numpy(np.ascontiguousarray(values))


def _describe(writer: Any, words: PreTrainedTokenizerFast, layers: int) -> None:
    """Add configuration, tokenizer and chat template."""
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    entries = json.loads(words.backend_tokenizer.to_str())["model"]
    tokens = sorted(entries["vocab"], key=entries["vocab"].get)
    end = words.eos_token_id
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if place == end else 1 for place in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in entries["merges"]])
    writer.add_eos_token_id(end)
    writer.add_chat_template(CHAT)
