"""Tiny random targets of every tested family, and the texts that they read; all made in memory.

Shapes: B sequences, T tokens, n positions, L tapped layers, H hidden.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from falcon_lab.data.packing import Batch
from falcon_lab.distill.inputs import drafter_inputs
from falcon_lab.interfaces import Drafter, DrafterInputs, Observation
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
"""Window of the families that have one; shorter than the sequences that tests use."""

POSITIONS = 256
"""Positions of a tiny model, unless others are given."""


def tiny_config(
    family: str,
    *,
    vocab: int = 64,
    hidden: int = 32,
    layers: int = 2,
    positions: int = POSITIONS,
) -> Any:
    """Return a tiny model's configuration: 4 heads, grouped queries where the family has them."""
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
    """Make a random float32 model in evaluation mode, with large weights so that logits differ."""
    config = tiny_config(family, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tiny_tokenizer(vocab: int = 64) -> PreTrainedTokenizerFast:
    """Make a tokenizer: id 0 is ``<eos>`` (and padding), id 1 ``<unk>``, then characters."""
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
    """Make a target in memory.

    Args:
        family: one of ``FAMILIES``.
        attention: Hugging Face's name of an implementation.
        vocab: V.
        shape: ``hidden``, ``layers``, ``positions`` and ``seed``, where they matter.
    """
    model = tiny_model(family, vocab=vocab, **shape)
    model.set_attn_implementation(attention)
    return Target(model, tiny_tokenizer(vocab), name=f"tiny-{family}")


@dataclass(frozen=True, slots=True)
class Text:
    """n + 1 tokens, and the hidden states that the target has for them.

    Attributes:
        tokens: ``[n + 1]`` long.
        features: ``[n + 1, H]``.
        taps: ``[n + 1, L, H]``, or None.
        target: what has read them.
    """

    tokens: Tensor
    features: Tensor
    taps: Tensor | None
    target: Target

    @classmethod
    def read(cls, target: Target, drafter: Drafter, tokens: Tensor) -> Text:
        """Let the target read ``[n + 1]`` tokens, tapped as the drafter needs it."""
        features, taps = read(target.tapped(drafter.taps), one_document(tokens))
        return cls(tokens, features[0], None if taps is None else taps[0], target)

    def observation(
        self, drafter: Drafter, start: int, stop: int, remaining: int = 0
    ) -> Observation:
        """Make the observation of positions ``start`` to ``stop``."""
        return Observation(
            self.tokens[start + 1 : stop + 1].clone(),
            self.features[start:stop].clone() if "features" in drafter.needs else None,
            remaining,
            None if self.taps is None else self.taps[start:stop].clone(),
        )


def random_tokens(target: Target, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``[count]`` tokens, none of which ends a text."""
    return torch.randint(1, target.vocab_size, (count,), generator=generator)


def one_document(tokens: Tensor) -> Batch:
    """Make a batch of ``[T]`` tokens alone."""
    return packed([[tokens]])


def packed(sequences: Sequence[Sequence[Tensor]]) -> Batch:
    """Make a batch of sequences of documents; all sequences are equally long."""
    lengths = [[len(document) for document in documents] for documents in sequences]
    tokens = torch.stack([torch.cat(list(documents)) for documents in sequences])
    numbers = [torch.cat([torch.full((n,), i) for i, n in enumerate(of_one)]) for of_one in lengths]
    places = [torch.cat([torch.arange(n) for n in of_one]) for of_one in lengths]
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, mask, torch.stack(numbers), torch.stack(places), torch.tensor(0))


def read(target: Target, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return features ``[B, T, H]`` of a batch and, of a tapped target, ``[B, T, L, H]``."""
    rows = batch.tokens, batch.documents, batch.positions
    if not target.taps:
        return target.teacher(*rows), None
    return target.tapped_teacher(*rows)


def training_inputs(
    target: Target, drafter: Drafter, batch: Batch, generator: torch.Generator
) -> DrafterInputs:
    """Make what a drafter is trained on, without noise."""
    features, taps = read(target.tapped(drafter.taps), batch)
    return drafter_inputs(batch, features, 0.0, (generator, generator), taps)
