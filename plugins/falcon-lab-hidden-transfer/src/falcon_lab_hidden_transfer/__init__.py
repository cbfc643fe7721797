"""Hidden Transfer for falcon-lab (arXiv 2404.12022). Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["HiddenTransferConfig", "register_components"]


@dataclass
class HiddenTransferConfig:
    """Configure the linear maps, and where what they make enters the target."""

    block: int = ranged(3, least=1, most=64)
    """Pseudo positions behind every node, each with a map of its own: k."""
    layer: int | None = ranged(None, least=1, most=10_000)
    """The decoder layer whose input the maps read and write, counted from 0; null is two thirds
    of the way up."""
    rows: int = ranged(96, least=1, most=1_000_000)
    """Positions of a training sequence, drawn anew in every step, behind which pseudo positions
    are trained: each costs k rows of the upper layers."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter."""
    register.drafter(
        "hidden_transfer",
        "falcon_lab_hidden_transfer.drafter:HiddenTransfer",
        config=HiddenTransferConfig,
    )
