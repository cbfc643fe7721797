"""A tiny target, a smaller assistant and an untrained drafter, as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from falcon_lab.config.schema import TargetConfig
from falcon_lab.drafters.saved import save_drafter
from falcon_lab.interfaces import BuildContext
from falcon_lab.model.loading import load_target
from falcon_lab.model.target import Target
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.registry import Components
from tiny_models import save_tiny

PROMPTS = "evaluation.prompts.texts=[abc def, hello there world]"


def save_models(folder: Path) -> Path:
    """``target``, ``assistant`` and ``drafter`` in a folder."""
    save_tiny(folder / "target")
    save_tiny(folder / "assistant", layers=1)
    target = load_target(TargetConfig(name=str(folder / "target"), device="cpu"))
    save_untrained(folder / "drafter", target, load_components())
    return folder


def save_untrained(
    folder: Path, target: Target, components: Components, card: str = "", **options: Any
) -> Path:
    """An untrained Falcon drafter for a target."""
    node = components.check("drafter", {"name": "falcon", **options}, "drafter")
    return save_drafter(
        folder,
        components.build("drafter", node, BuildContext(host=target)),
        node=node,
        provenance=components.provenance("drafter", node),
        target=target,
        card=card,
    )
