"""Tiny targets of three families, and engines around a drafter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from falcon_lab.components import Components
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.plugins import Registrar, load_components
from falcon_lab.protocols import BuildContext, DrafterInputs, Observation
from falcon_lab.targets.target import Target

FAMILIES = ("LlamaConfig", "Qwen2Config", "GPT2Config")


def target(family: str = "LlamaConfig", vocabulary: int = 12, layers: int = 3) -> Target:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family != "GPT2Config":
        shape["num_key_value_heads"] = 2
    config = getattr(transformers, family)(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    no_words: Any = SimpleNamespace(get_vocab=dict, eos_token_id=None)
    return Target(model, no_words, name=family)


def components() -> Components:
    """Everything built in and what this distribution registers, installed or not."""
    import falcon_lab_dflash

    registrar = Registrar("falcon-lab-dflash", "0")
    falcon_lab_dflash.register_components(registrar)
    others = load_components().components
    own = [c for c in others if c.distribution != "falcon-lab-dflash"]
    return Components([*own, *registrar.components])


def drafter(of: Target, **options: Any) -> Any:
    node = {"name": "dflash", "block": 3, **options}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = components().build("drafter", node, BuildContext(of))
    return made.eval()


def engine(of: Target, made: Any, tree: dict[str, Any]) -> SpeculativeEngine:
    build, context = components().build, BuildContext.of(of, made)
    return SpeculativeEngine(
        of,
        made,
        build("tree_builder", tree, context),
        build("acceptance_rule", {"name": "auto"}, context),
        build("controller", {"name": "fixed"}, context),
    )


def write(
    by: Any,
    prompt: list[int],
    count: int,
    generator: torch.Generator | None = None,
    **sampling: Any,
) -> Any:
    return by.generate(
        torch.tensor(prompt),
        max_new_tokens=count,
        sampling=Sampling(**sampling),
        generator=generator or torch.Generator(),
        stop=StopCondition(),
    )


def inputs(of: Target, made: Any, tokens: torch.Tensor, documents: torch.Tensor) -> DrafterInputs:
    """Rows of packed documents, as training gives them."""
    start = torch.zeros_like(documents, dtype=torch.bool)
    start[:, 0], start[:, 1:] = True, documents[:, 1:] != documents[:, :-1]
    column = torch.arange(tokens.shape[1]).expand_as(tokens)
    positions = column - torch.where(start, column, 0).cummax(1).values
    features, taps = of.tapped(made.taps).tapped_teacher(tokens, documents, positions)
    rows = (tokens[:, 1:], features[:, :-1], documents[:, :-1], positions[:, :-1])
    return DrafterInputs(*rows, torch.Generator().manual_seed(0), taps[:, :-1])


def seen(rows: DrafterInputs, sequence: int, start: int, stop: int) -> Observation:
    """Rows of one sequence, as decoding gives them."""
    assert rows.taps is not None
    part = slice(start, stop)
    return Observation(rows.tokens[sequence, part], None, 0, rows.taps[sequence, part])
