"""Medusa for falcon-lab (arXiv 2401.10774): heads, tree, rule and loss. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.plugins.hooks import Register

__all__ = ["MedusaConfig", "MedusaObjectiveConfig", "TypicalConfig", "register_components"]


@dataclass
class MedusaConfig:
    """The heads."""

    block: int = 4
    """Heads, each for one more token below the root: k."""
    layers: int = 1
    """Residual layers of a head."""
    head: str = "own"
    """``own``: every head has an output layer, which begins as the target's LM head (published);
    ``shared``: all of them use the target's frozen LM head, and have few weights."""

    def __post_init__(self) -> None:
        for key in ("block", "layers"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")
        if self.head not in ("own", "shared"):
            raise ValueError(f"head is {self.head!r}; choose one of own, shared")


@dataclass
class MedusaObjectiveConfig:
    """Cross-entropy of every head, the later ones weighted less."""

    decay: float = 0.8
    """Head i, from 1 on, has weight decay^i (0.8 in the paper; 1 in the official code)."""
    label: str = "data"
    """What a head is to say: the ``data``'s token (published), the target's ``argmax``, or all of
    the target's distribution (``soft``)."""

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must lie in (0, 1], got {self.decay}")
        if self.label not in ("data", "argmax", "soft"):
            raise ValueError(f"label is {self.label!r}; choose one of data, argmax, soft")


@dataclass
class TypicalConfig:
    """Typical acceptance: p(x) > min(epsilon, alpha·exp(-H(p))). It is lossy."""

    epsilon: float = 0.09
    """What is likelier than this is always accepted."""
    alpha: float = 0.3
    """Of what the target's own uncertainty allows; about the square root of epsilon."""

    def __post_init__(self) -> None:
        for key in ("epsilon", "alpha"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key} must lie in (0, 1], got {getattr(self, key)}")


@hookimpl
def register_components(register: Register) -> None:
    """Register all four."""
    register.drafter("medusa", "falcon_lab_medusa.drafter:MedusaDrafter", config=MedusaConfig)
    register.objective(
        "medusa", "falcon_lab_medusa.objective:MedusaObjective", config=MedusaObjectiveConfig
    )
    register.template("mc_sim_7b_63", "falcon_lab_medusa.template:mc_sim_7b_63")
    register.acceptance_rule("typical", "falcon_lab_medusa.typical:Typical", config=TypicalConfig)
