"""Engines put together from a target, a drafter and a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from falcon_lab.acceptance import Auto
from falcon_lab.controllers import Fixed
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.decoding.generation import Generation
from falcon_lab.decoding.plain import PlainEngine
from falcon_lab.decoding.stopping import StopCondition
from falcon_lab.interfaces import BuildContext, TreeBuilder
from falcon_lab.plugins.builtins import FixedConfig
from falcon_lab.sampling import Sampling
from falcon_lab.trees.paths import Path, checked
from falcon_lab.trees.template_tree import TemplateTree

HOST: Any = None
CONTEXT = BuildContext(HOST)


def chain(depth: int) -> list[Path]:
    return [(0,) * length for length in range(1, depth + 1)]


def speculative(
    target: Any,
    drafter: Any,
    tree: Sequence[Path] | TreeBuilder,
    *,
    proposal: Any = "deterministic",
    rule: Any = None,
    controller: Any = None,
) -> SpeculativeEngine:
    """``tree`` is a template's paths or a builder."""
    if isinstance(tree, Sequence):
        tree = TemplateTree(checked(tree), drafter.block, proposal)
    return SpeculativeEngine(
        target,
        drafter,
        tree,
        rule or Auto(None, CONTEXT),
        controller or Fixed(FixedConfig(), CONTEXT),
    )


def generate(
    engine: Any,
    prompt: Sequence[int] = (1, 2),
    max_new_tokens: int = 24,
    *,
    stop: StopCondition | None = None,
    generator: torch.Generator | None = None,
    seed: int = 0,
    on_round: Any = None,
    **sampling: Any,
) -> Generation:
    return engine.generate(
        torch.tensor(prompt, dtype=torch.long),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(**sampling),
        generator=generator or torch.Generator().manual_seed(seed),
        stop=stop or StopCondition(),
        on_round=on_round,
    )


def plain(target: Any, *arguments: Any, **settings: Any) -> Generation:
    return generate(PlainEngine(target), *arguments, **settings)
