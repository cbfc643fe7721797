"""Medusa for falcon-lab (arXiv 2401.10774): heads, tree, rule and loss. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import choice, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["MedusaConfig", "MedusaObjectiveConfig", "TypicalConfig", "register_components"]


@dataclass
class MedusaConfig(DraftVocabularyOption):
    """Configure the heads."""

    block: int = ranged(4, least=1, most=64)
    """Heads, each for one more token below the root: k."""
    layers: int = ranged(1, least=1, most=100)
    """Residual layers of a head."""
    head: str = choice("own", ("own", "shared"))
    """``own``: every head has an output layer, which begins as the target's LM head (published);
    ``shared``: all of them use the target's frozen LM head, and have few weights."""


@dataclass
class MedusaObjectiveConfig:
    """Configure the cross-entropy of every head, the later ones weighted less."""

    decay: float = ranged(0.8, least=1e-3, most=1)
    """Head i, from 1 on, has weight decay^i (0.8 in the paper; 1 in the official code)."""
    label: str = choice("data", ("data", "argmax", "soft"))
    """What a head learns: the ``data``'s token (published), the target's ``argmax``, or all of
    the target's distribution (``soft``)."""


@dataclass
class TypicalConfig:
    """Configure typical acceptance, which is lossy: p(x) > min(epsilon, alpha·exp(-H(p)))."""

    epsilon: float = ranged(0.09, above=0, most=1)
    """Tokens of a higher probability are always accepted."""
    alpha: float = ranged(0.3, above=0, most=1)
    """Factor of what the target's own uncertainty allows; about the square root of epsilon."""


@hookimpl
def register_components(register: Register) -> None:
    """Register all four."""
    register.drafter(
        "medusa",
        "falcon_lab_medusa.drafter:MedusaDrafter",
        config=MedusaConfig,
        exports={
            "vllm": "falcon_lab_medusa.exports:MedusaVllm",
        },
        imports="falcon_lab_medusa.imports:MedusaFolder",
    )
    register.objective(
        "medusa", "falcon_lab_medusa.objective:MedusaObjective", config=MedusaObjectiveConfig
    )
    register.template("mc_sim_7b_63", "falcon_lab_medusa.template:mc_sim_7b_63")
    register.acceptance_rule("typical", "falcon_lab_medusa.typical:Typical", config=TypicalConfig)
