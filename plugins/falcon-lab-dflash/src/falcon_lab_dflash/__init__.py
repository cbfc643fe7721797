"""A block drafter like DFlash (arXiv 2602.06036) for falcon-lab. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["DFlashConfig", "register_components"]


@dataclass
class DFlashConfig(DraftVocabularyOption):
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


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter."""
    register.drafter(
        "dflash",
        "falcon_lab_dflash.drafter:DFlashDrafter",
        config=DFlashConfig,
        exports={
            "vllm": "falcon_lab_dflash.exports:DFlashVllm",
            "sglang": "falcon_lab_dflash.exports:DFlashSglang",
        },
    )
