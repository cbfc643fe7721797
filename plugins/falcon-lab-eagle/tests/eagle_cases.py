"""Tiny targets of three families, EAGLE's heads for them, and engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from falcon_lab_eagle import Eagle3Config, EagleConfig
from falcon_lab_eagle.eagle import EagleDrafter
from falcon_lab_eagle.eagle3 import Eagle3Drafter
from falcon_lab_eagle.tree import published_tree
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig
from transformers import Gemma3TextConfig as GemmaConfig

from falcon_lab.acceptance.auto import Auto
from falcon_lab.builtins import ChainConfig, DynamicTreeConfig, FixedConfig, StaticConfig
from falcon_lab.controllers.fixed import Fixed
from falcon_lab.decoding.baseline import PlainEngine
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.protocols import BuildContext, DrafterInputs
from falcon_lab.targets.target import Target
from falcon_lab.trees.chain import Chain
from falcon_lab.trees.dynamic import DynamicTree
from falcon_lab.trees.static import StaticTree

VOCAB, HIDDEN, POSITIONS = 12, 32, 128
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_size": HIDDEN,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GROUPED = {"intermediate_size": 48, "num_key_value_heads": 2}
KINDS = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, GROUPED),
    "gpt2": (GPT2Config, {}),
    "gemma3": (
        GemmaConfig,
        {**GROUPED, "head_dim": 8, "sliding_window": 6, "layer_types": KINDS},
    ),
}
HEADS: dict[str, tuple[type, Any]] = {
    "eagle": (EagleDrafter, EagleConfig()),
    "eagle3": (Eagle3Drafter, Eagle3Config()),
    "eagle3-own": (Eagle3Drafter, Eagle3Config(taps=[1, 3], head="own")),
}


@cache
def target(family: str = "llama", vocab: int = VOCAB) -> Target:
    """A random target whose weights are large, so that its logits differ."""
    kind, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = kind(**SHARED, **own, vocab_size=vocab)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
    words: Any = SimpleNamespace(get_vocab=dict, eos_token_id=None)
    return Target(model, words, name=f"tiny {family}")


def drafter(name: str = "eagle", family: str = "llama", *, on: Target | None = None) -> Any:
    """A fresh head, its weights moved about."""
    kind, config = HEADS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = kind(config, BuildContext(on or target(family)))
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(0.1 * torch.randn_like(weight))
    return made.eval()


def tree(name: str, proposal: str = "deterministic") -> Any:
    context = BuildContext(target(), 1)
    if name == "chain":
        return Chain(ChainConfig(4, proposal), context)
    if name == "dynamic":
        return DynamicTree(DynamicTreeConfig(nodes=8, beam=3, width=3, depth=4), context)
    if name == "eagle2":
        return DynamicTree(DynamicTreeConfig(nodes=60, beam=10, width=10, depth=7), context)
    return StaticTree(StaticConfig(published_tree(None, context), proposal), context)


def engine(made: Any, on: Any, family: str = "llama", host: Any = None) -> SpeculativeEngine:
    host = host or target(family)
    context = BuildContext(host, 1)
    return SpeculativeEngine(host, made, on, Auto(None, context), Fixed(FixedConfig(), context))


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


def plain(prompt: Sequence[int], new: int, family: str = "llama") -> list[int]:
    return generate(PlainEngine(target(family)), prompt, new).tokens


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def inputs(made: Any, *lengths: int) -> DrafterInputs:
    """Rows of packed documents, as the target reads them."""
    tokens = text(sum(lengths) + 1)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    taps = getattr(made, "taps", ()) or (0,)
    read = made.host.tapped(taps).tapped_teacher(tokens[None, :-1], documents, positions)
    return DrafterInputs(
        tokens[None, 1:], read[0], documents, positions, torch.Generator(), read[1]
    )
