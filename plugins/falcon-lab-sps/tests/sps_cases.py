"""Tiny targets of three families, draft models for them, and texts of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from falcon_lab_sps import SpsConfig
from falcon_lab_sps.drafter import SpsDrafter
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast
from transformers import Gemma3TextConfig as GemmaConfig

from falcon_lab.acceptance.auto import Auto
from falcon_lab.builtins import DynamicTreeConfig, FixedConfig, StaticConfig
from falcon_lab.controllers.fixed import Fixed
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.protocols import BuildContext, Frontier, Observation
from falcon_lab.targets.target import Target
from falcon_lab.trees.dynamic import DynamicTree
from falcon_lab.trees.static import StaticTree

VOCAB = 12
POSITIONS = 128
ROOT = Frontier.root(torch.device("cpu"))
BRANCHED = {"": 3, "0": 2, "1": 1, "00": 2, "000": 1, "001": 1}

SHARED: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"intermediate_size": 48, "num_key_value_heads": 2}),
    "gpt2": (GPT2Config, {}),
    "gemma3": (
        GemmaConfig,
        {
            **{"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
            **{"query_pre_attn_scalar": 8, "sliding_window": 6, "layer_types": KINDS},
        },
    ),
}


def model(family: str, seed: int = 0, vocab: int = VOCAB, **changes: Any) -> Any:
    """A random model whose weights are large, so that its logits differ."""
    kind, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {**SHARED, **own, "vocab_size": vocab, **changes}
        made = AutoModelForCausalLM.from_config(kind(**shape), dtype=torch.float32)
        for weight in made.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    return made.eval()


def tokenizer(words: Sequence[str] = "eabcdfghijkl") -> PreTrainedTokenizerFast:
    """One token a letter; the first ends a text."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[1]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=words[0])


@cache
def target(family: str) -> Target:
    return Target(model(family), tokenizer(), name=f"tiny {family}")


def drafter(family: str = "llama", seed: int = 1, **options: Any) -> SpsDrafter:
    """A fresh draft model whose weights are large too."""
    made = SpsDrafter(SpsConfig(**options), BuildContext(target(family)))
    generator = torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2, generator=generator)
    return made.eval()


def static(template: Any, proposal: str = "deterministic") -> StaticTree:
    config = StaticConfig(template=template, proposal=proposal)
    return StaticTree(config, BuildContext(target("llama"), 1))


def dynamic(nodes: int) -> DynamicTree:
    shape = DynamicTreeConfig(nodes=nodes, beam=3, width=3, depth=4)
    return DynamicTree(shape, BuildContext(target("llama"), 1))


def chain(depth: int, proposal: str = "deterministic") -> StaticTree:
    return static(["0" * length for length in range(1, depth + 1)], proposal)


def engine(family: str, draft: SpsDrafter, tree: Any, controller: Any = None) -> SpeculativeEngine:
    context = BuildContext(target(family), 1)
    rule = Auto(None, context)
    return SpeculativeEngine(
        target(family), draft, tree, rule, controller or Fixed(FixedConfig(), context)
    )


def generate(
    one: Any, prompt: Sequence[int], new: int, generator: Any = None, **sampling: Any
) -> Generation:
    return one.generate(
        torch.tensor(prompt),
        max_new_tokens=new,
        sampling=Sampling(**sampling),
        generator=generator or torch.Generator().manual_seed(0),
        stop=StopCondition(),
    )


def plain(family: str, prompt: Sequence[int], new: int) -> list[int]:
    return generate(PlainEngine(target(family)), prompt, new).tokens


def tell(draft: SpsDrafter, text: Sequence[int], remaining: int = 0) -> None:
    draft.observe(Observation(torch.tensor(text, dtype=torch.long), None, remaining))


@torch.no_grad()
def uncached(draft: SpsDrafter, text: Sequence[int]) -> Tensor:
    """``[V]`` after a text, read from the start in one pass without a cache."""
    first = 1 if draft.config.model is None else 0
    tokens = torch.tensor([text[first:]])
    positions = torch.arange(first, len(text))[None]
    mask = torch.ones(1, len(text) - first, len(text) - first, dtype=torch.bool).tril()
    hidden = draft.model(tokens=tokens, positions=positions, mask=mask)
    return draft.model.logits(hidden)[0, -1]
