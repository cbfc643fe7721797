"""Self-speculation: the target drafts for itself. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.errors import ConfigError
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["DraftExitConfig", "SelfSpecConfig", "register_components"]

SKIPS = ("skip_attention", "skip_mlp")


@dataclass
class SelfSpecConfig:
    """Configure which part of the target drafts. Layers are counted from 0."""

    skip_attention: list[int] | None = ranged(None, least=0, most=9999)
    """Layers whose attention is skipped (Draft & Verify); null skips none where ``skip_mlp`` is
    given. With neither, every second layer of the target's middle half is skipped whole."""
    skip_mlp: list[int] | None = ranged(None, least=0, most=9999)
    """Layers whose feed-forward network is skipped; null is as above."""
    layers: int | None = ranged(None, least=1, most=9999)
    """Run the first so many layers alone (LayerSkip's early exit), in place of the two above."""

    def __post_init__(self) -> None:
        for key in SKIPS:
            given = getattr(self, key)
            if given is not None and self.layers is not None:
                raise ConfigError("layers", f"excludes {key}; leave one of them out")
            if twice := sorted({layer for layer in given or () if given.count(layer) > 1}):
                raise ConfigError(key, f"has layer {twice[0]} twice; leave one out")


@dataclass
class DraftExitConfig:
    """Configure Draft & Verify's adaptive draft exit; the names are those of the paper's symbols
    in words."""

    threshold: float | None = ranged(None, least=0, most=1)
    """γ at a text's beginning: no token is drafted behind one that is less likely; null is 0.8 in
    greedy decoding and 0.5 in sampling."""
    most: int = ranged(12, least=1, most=1000)
    """K: most draft tokens of a round; the tree may allow fewer."""
    target_rate: float = ranged(0.9, least=0, most=1)
    """α: γ rises in rounds after which the acceptance rate is below it."""
    step: float = ranged(0.01, least=0, most=1)
    """ε: by how much γ would rise or fall without its memory."""
    rate_memory: float = ranged(0.5, least=0, most=1)
    """β1: share of the former acceptance rate in the new one."""
    threshold_memory: float = ranged(0.9, least=0, most=1)
    """β2: share of the former γ in the new one."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter and the controller."""
    register.drafter(
        "selfspec", "falcon_lab_selfspec.drafter:SelfSpecDrafter", config=SelfSpecConfig
    )
    register.controller(
        "draft_exit", "falcon_lab_selfspec.draft_exit:DraftExit", config=DraftExitConfig
    )
