"""Sequentially dependent heads for falcon-lab: Hydra and Chimera. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import choice, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["ChimeraConfig", "HydraConfig", "register_components"]


@dataclass
class HydraConfig(DraftVocabularyOption):
    """Configure Hydra's heads (arXiv 2402.05109); with ``prefix`` and ``layers: 4`` Hydra++."""

    heads: int = ranged(4, least=1, most=64)
    """Heads, each for one more token below the root: the passes of a round."""
    layers: int = ranged(1, least=1, most=100)
    """Layers of a head's MLP (four in Hydra++)."""
    prefix: bool = False
    """Hydra++'s prefix attention: the heads read the output of a decoder layer over the target's
    features of the whole text, in place of the newest feature."""
    head: str = choice("own", ("own", "shared"))
    """``own``: every head has an output layer, which begins as the target's LM head (published);
    ``shared``: all of them use the target's frozen LM head, and have few weights."""


@dataclass
class ChimeraConfig(DraftVocabularyOption):
    """Configure Chimera's draft model (arXiv 2402.15758)."""

    heads: int = ranged(4, least=1, most=64)
    """Residual heads, each for one more token below the root: the passes of a round."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafters, and the tree that Chimera was published with."""
    register.drafter("hydra", "falcon_lab_hydra.hydra:HydraDrafter", config=HydraConfig)
    register.drafter("chimera", "falcon_lab_hydra.chimera:ChimeraDrafter", config=ChimeraConfig)
    register.template("chimera", "falcon_lab_hydra.tree:published_tree")
