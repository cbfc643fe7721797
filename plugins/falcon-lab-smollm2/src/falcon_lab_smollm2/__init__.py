"""SmolLM2-135M-Instruct for falcon-lab: target, dialogues and drafter. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from falcon_lab import hookimpl
from falcon_lab.plugins.hooks import Register

__all__ = ["register_components"]

HERE = Path(__file__).resolve().parent


@hookimpl
def register_components(register: Register) -> None:
    """Register the target, a drafter that was trained for it, and what it was trained on."""
    register.target(
        "smollm2",
        f"{__name__}.target:installed_file",
        published="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    register.saved_drafter("smollm2", HERE / "drafter")
    register.corpus("smollm2-dialogues", HERE / "dialogues")
