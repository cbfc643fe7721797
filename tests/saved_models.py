"""A tiny target, a smaller assistant and an untrained drafter, as folders."""

from __future__ import annotations

from pathlib import Path

from falcon_lab.drafters.saved import save_drafter
from falcon_lab.plugins import load_components
from falcon_lab.protocols import BuildContext
from falcon_lab.schema import TargetConfig
from falcon_lab.targets.loading import load_target
from tiny_models import save_tiny

PROMPTS = "evaluation.prompts.texts=[abc def, hello there world]"


def save_models(folder: Path) -> Path:
    """``target``, ``assistant`` and ``drafter`` in a folder."""
    save_tiny(folder / "target")
    save_tiny(folder / "assistant", layers=1)
    target = load_target(TargetConfig(name=str(folder / "target"), device="cpu"))
    components = load_components()
    node = components.check("drafter", {"name": "falcon"}, "drafter")
    save_drafter(
        folder / "drafter",
        components.build("drafter", node, BuildContext(host=target)),
        node=node,
        provenance=components.provenance("drafter", node),
        target=target,
        card="",
    )
    return folder
