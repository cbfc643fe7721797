"""Block drafters like DFlash (arXiv 2602.06036) for falcon-lab. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, LayerOptions, Register

__all__ = ["DFlashConfig", "DSparkConfig", "DominoConfig", "register_components"]


@dataclass
class DFlashConfig(LayerOptions, DraftVocabularyOption):
    """Configure the drafter."""

    block: int = ranged(8, least=1, most=256)
    """Tokens that a pass drafts, k: the masked positions after the root. Published heads have 15,
    and call the 16 with the root a block."""
    layers: int = ranged(2, least=1, most=100)
    """Draft layers (five in the published heads)."""
    taps: list[int] = ranged([], least=0, most=1000)
    """Layers of the target whose hidden states are read, 0 being its embeddings; empty: up to five,
    from the first to the last but one in equal steps."""
    anchors: int = ranged(32, least=1, most=10_000)
    """Blocks of a packed sequence that are trained at a time, at random places."""
    causal: bool = False
    """A position attends to those of its block up to itself alone (JetSpec)."""
    eps: float | None = ranged(None, above=0, most=1)
    """Of the norms; null is the least difference of the numbers' precision, as torch has it."""


@dataclass
class DSparkConfig(DFlashConfig):
    """Configure a block drafter with DSpark's Markov head (arXiv 2607.05147)."""

    block: int = ranged(7, least=1, most=64)
    """Tokens that a round drafts at most: the masked positions after the root, and passes."""
    rank: int = ranged(256, least=1, most=100_000)
    """Of the head: the width of what it keeps of the token before."""


@dataclass
class DominoConfig(DFlashConfig):
    """Configure a block drafter with Domino's causal correction (arXiv 2605.29707)."""

    block: int = ranged(7, least=1, most=64)
    """Tokens that a round drafts at most: the masked positions after the root, and passes."""
    rank: int = ranged(256, least=1, most=100_000)
    """Of the correction, which is a map of the state and the block's output through so many."""
    state: int = ranged(256, least=1, most=100_000)
    """Width of the recurrent state of a path (1024 in the published heads)."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafters."""
    register.drafter(
        "dflash",
        "falcon_lab_dflash.drafter:DFlashDrafter",
        config=DFlashConfig,
        exports={
            "vllm": "falcon_lab_dflash.exports:DFlashVllm",
            "sglang": "falcon_lab_dflash.exports:DFlashSglang",
        },
        imports="falcon_lab_dflash.imports:DFlashFolder",
    )
    register.drafter("dspark", "falcon_lab_dflash.corrected:DSparkDrafter", config=DSparkConfig)
    register.drafter("domino", "falcon_lab_dflash.corrected:DominoDrafter", config=DominoConfig)
