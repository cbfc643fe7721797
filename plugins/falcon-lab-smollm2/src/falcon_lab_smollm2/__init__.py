"""SmolLM2-135M-Instruct as a target for falcon-lab. Importing this imports no torch."""

from __future__ import annotations

from falcon_lab import hookimpl
from falcon_lab.plugins.hooks import Register

__all__ = ["register_components"]


@hookimpl
def register_components(register: Register) -> None:
    """Register the target."""
    register.target("smollm2", "falcon_lab_smollm2.target:installed_file")
