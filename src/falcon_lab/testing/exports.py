"""Checks of a format of another program: nothing of a drafter is lost, and the rest is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.drafters.saved import CARD, CONFIG, WEIGHTS, save_drafter
from falcon_lab.export.folder import Export, import_drafter, read_origin
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.decoding import build_drafter
from falcon_lab.testing.tested import ContractError


def save_for_export(
    folder: Path, target: Target, node: Mapping[str, Any], components: Components
) -> Any:
    """Build a drafter with weights that are moved about, save it, and return it.

    Args:
        folder: where to.
        target: what it drafts for.
        node: describes it.
        components: know it.
    """
    made = build_drafter(target, dict(node), components=components, seed=3, stir=0.1)
    checked = components.check("drafter", node, "drafter")
    save_drafter(
        folder,
        made,
        node=checked,
        provenance=components.provenance("drafter", checked),
        target=target,
        card="# a drafter\n",
    )
    return made.eval()


def check_export(
    folder: Path, target: Target, node: Mapping[str, Any], name: str, components: Components
) -> Export:
    """Export a drafter, compare the folder, and import it: bit for bit what it was.

    Args:
        folder: an empty one.
        target: what it drafts for.
        node: describes it.
        name: of the format.
        components: know drafter and format.

    Raises:
        ContractError: something is lost.
    """
    save_for_export(folder / "before", target, node, components)
    export = Export.of(folder / "before", name, target, "org/target", components, 4)
    out = export.write(folder / "out")
    if lines := export.differences(out):
        raise ContractError(f"what is read back is not what was written: {lines[0]}")
    import_drafter(out, read_origin(out), folder / "after", target, components)
    for part in (CONFIG, WEIGHTS, CARD):
        if (folder / "after" / part).read_bytes() != (folder / "before" / part).read_bytes():
            raise ContractError(f"{part} is another after export and import")
    card = (out / CARD).read_text("utf-8")
    if missing := [tag for tag in ("org/target", *export.form.tags) if tag not in card]:
        raise ContractError(f"its card lacks {missing[0]}")
    return export
