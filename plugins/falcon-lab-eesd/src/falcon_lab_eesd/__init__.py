"""Early-exit speculative decoding (EESD, arXiv 2406.03853). Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import any_seed, ranged
from falcon_lab.plugins.hooks import DraftVocabularyOption, Register

__all__ = ["BetaConfig", "CalibrationConfig", "EesdConfig", "register_components"]


@dataclass
class EesdConfig(DraftVocabularyOption):
    """Configure the early exit."""

    layers: int | None = ranged(None, least=1, most=1000)
    """N, the target's first layers, which are run as they are; null is a quarter of them."""
    trained: int = ranged(1, least=1, most=64)
    """Decoder layers that are trained behind them; a pass runs them all."""
    reuse: bool = True
    """Whether verification begins with layer N, on what drafting has computed; false: it runs all
    layers, as it does for other drafters."""


@dataclass
class BetaConfig:
    """Configure Beta-TS: what was accepted in the text decides how long to draft."""

    most: int | None = ranged(12, least=1, most=1000)
    """Depth up to which it drafts; null leaves that to the tree."""
    accepted: float = ranged(1.0, above=0.0, most=1e6)
    """The prior's accepted tokens, α."""
    refused: float = ranged(1.0, above=0.0, most=1e6)
    """The prior's refused tokens, β."""
    seed: int = any_seed()
    """Of its draws, which begin anew with every text."""


@dataclass
class CalibrationConfig(BetaConfig):
    """Configure Calibration-TS: the drafter's own probability of a token counts, too."""

    weight: float = ranged(4.0, least=0.0, most=1e6)
    """How many observed tokens that probability stands for, κ; 0 makes it Beta-TS."""
    temperature: float = ranged(1.0, above=0.0, most=1000.0)
    """By which the drafter's logits are divided to calibrate it: more than 1 for a drafter that is
    too sure."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter and the controllers."""
    register.drafter("eesd", "falcon_lab_eesd.drafter:EesdDrafter", config=EesdConfig)
    register.controller("beta_ts", "falcon_lab_eesd.thompson:BetaTs", config=BetaConfig)
    register.controller(
        "calibration_ts", "falcon_lab_eesd.thompson:CalibrationTs", config=CalibrationConfig
    )
