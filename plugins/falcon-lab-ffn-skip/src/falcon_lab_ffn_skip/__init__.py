"""FFN-SkipLLM for falcon-lab (arXiv 2404.03865). Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["FfnSkipConfig", "register_components"]


@dataclass
class FfnSkipConfig:
    """Configure which feed-forward networks are left out, and when."""

    threshold: float = ranged(0.95, least=-1, most=1)
    """Cosine of the hidden states before and behind a network from which on a token is saturated:
    it skips the networks of the layers that follow."""
    first: int | None = ranged(None, least=0, most=10_000)
    """Layers at the bottom whose networks always run; null is a quarter of all."""
    last: int | None = ranged(None, least=0, most=10_000)
    """Layers at the top whose networks always run; null is a tenth of all, at least one."""
    warmup: int = ranged(25, least=0, most=1_000_000)
    """Positions at the beginning of a text that go through all networks."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the engine, which is lossy, and the drafter."""
    register.engine("ffn_skip", "falcon_lab_ffn_skip.skipping:ffn_skip", config=FfnSkipConfig)
    register.drafter(
        "ffn_skip", "falcon_lab_ffn_skip.skipping:FfnSkipDrafter", config=FfnSkipConfig
    )
