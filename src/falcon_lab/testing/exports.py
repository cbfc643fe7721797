"""Checks of the formats of other programs: nothing of a drafter is lost, and the rest is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.drafters.saved import CARD, CONFIG, WEIGHTS, load_drafter, read_state, save_drafter
from falcon_lab.export.folder import (
    ORIGIN,
    Export,
    different_tensors,
    import_drafter,
    read_origin,
)
from falcon_lab.export.strangers import import_strangers
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.decoding import build_drafter, rounds_of
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
    place = "org/target"
    export = Export.of(folder / "before", name, target, place, components, 4, place)
    out = export.write(folder / "out")
    if lines := export.differences(out):
        raise ContractError(f"what is read back is not what was written: {lines[0]}")
    import_drafter(out, read_origin(out), folder / "after", target, components)
    for part in (CONFIG, WEIGHTS, CARD):
        if (folder / "after" / part).read_bytes() != (folder / "before" / part).read_bytes():
            raise ContractError(f"{part} is another after export and import")
    card = (out / CARD).read_text("utf-8")
    if missing := [tag for tag in (place, *export.form.tags) if tag not in card]:
        raise ContractError(f"its card lacks {missing[0]}")
    return export


def check_import(
    folder: Path, target: Target, node: Mapping[str, Any], name: str, components: Components
) -> None:
    """Export a drafter, forget that it was ours, and import it as a stranger's.

    Args:
        folder: an empty one.
        target: what it drafts for.
        node: describes it.
        name: of the format.
        components: know drafter and formats.

    Raises:
        ContractError: its weights are others, or it drafts something else.
    """
    save_for_export(folder / "before", target, node, components)
    export = Export.of(folder / "before", name, target, "org/target", components, 4)
    (export.write(folder / "out") / ORIGIN).unlink()
    import_strangers(folder / "out", folder / "after", target, components, None)
    states = [read_state(folder / each / WEIGHTS) for each in ("after", "before")]
    if lines := list(different_tensors(*states)):
        raise ContractError(f"what a stranger's folder gives is something else: {lines[0]}")
    made = [load_drafter(folder / each, target, components) for each in ("before", "after")]
    before, after = (rounds_of(target, each, components) for each in made)
    if before != after:
        raise ContractError(f"the imported drafter drafts {after}, and the one before {before}")
