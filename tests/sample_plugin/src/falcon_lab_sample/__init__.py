"""Registers one component of each kind that a drafting method is made of. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import Register


@dataclass
class MlpConfig:
    """The drafter's options."""

    width: int = ranged(2, least=1)
    """Hidden units, in multiples of the target's."""


@dataclass
class StepConfig:
    """The schedule's options."""

    until: float = ranged(0.5, least=0, most=1)
    """Share of the training after which nothing is shown any more."""
    ratio: float = ranged(0.3, least=0, most=1)


@dataclass
class RakeConfig:
    """The tree builder's options."""

    width: int = ranged(2, least=1)
    """Paths that leave the root."""
    depth: int = ranged(3, least=0)


@hookimpl
def register_components(register: Register) -> None:
    """Register all three."""
    register.drafter("sample-mlp", "falcon_lab_sample.drafter:MlpDrafter", config=MlpConfig)
    register.schedule("sample-step", "falcon_lab_sample.schedule:Step", config=StepConfig)
    register.tree_builder("sample-rake", "falcon_lab_sample.tree:Rake", config=RakeConfig)
