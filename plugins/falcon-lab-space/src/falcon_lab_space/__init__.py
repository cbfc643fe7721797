"""SPACE for falcon-lab (arXiv 2402.11809). Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import choice, filled, ranged
from falcon_lab.plugins.hooks import Register, TuningOptions

__all__ = ["SarSftConfig", "SpaceConfig", "register_components"]


@dataclass
class SarSftConfig(TuningOptions):
    """Configure the training that teaches a target to answer mask tokens (SAR-SFT)."""

    masks: int = ranged(3, least=1, most=64)
    """Mask tokens behind a position, each of which predicts a token further ahead: k."""
    layout: str = choice("packed", ("packed", "truncated"))
    """``packed``: masks stand behind many positions of a sequence, hidden from its tokens, all of
    which count in the loss too (the paper's efficient form); ``truncated``: half of the documents
    are cut at one position, and end in masks."""
    positions: int = ranged(48, least=1, most=2**20)
    """Positions of a packed sequence, drawn anew in every step, that have masks behind them."""
    weights: str = choice("full", ("full", "lora"))
    """``full``: all are trained; ``lora``: low-rank additions (the package peft), merged in the
    end, and the mask token's embedding."""
    rank: int = ranged(16, least=1, most=4096)
    """Of the additions."""
    mask_token: str | None = filled(None, "name a token, or write null")
    """A special token that is otherwise never used, or a new one; null takes a reserved one of the
    tokenizer where there is one."""


@dataclass
class SpaceConfig:
    """Configure the drafter of a target that was tuned by ``sar_sft``."""

    block: int | None = ranged(None, least=1, most=64)
    """Mask tokens behind every node: k; null is as many as the target was tuned with."""
    mask_token: str | None = filled(None, "name a token, or write null")
    """null is the one that the target was tuned with."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the tuner and the drafter."""
    register.tuner("sar_sft", "falcon_lab_space.tuner:SarSft", config=SarSftConfig)
    register.drafter("space", "falcon_lab_space.drafter:Space", config=SpaceConfig)
