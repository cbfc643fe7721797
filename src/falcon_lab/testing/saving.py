"""A drafter on disk is the same drafter."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from falcon_lab.drafters.saved import load_drafter, save_drafter
from falcon_lab.testing.conversation import Case, Conversation


def check_saved(case: Case) -> None:
    """Saved, built anew and loaded, it drafts the same."""
    drafter = case.fresh()
    components, node = case.subject.registered()
    with TemporaryDirectory() as place:
        folder = save_drafter(
            Path(place) / "drafter",
            drafter,
            node=node,
            provenance=components.provenance("drafter", node),
            target=case.target,
            card="",
        )
        loaded = load_drafter(folder, case.target, components)
    rounds = []
    for each in (loaded, drafter):
        talk = Conversation(each, case.text(each, 12))
        talk.observe(12)
        rounds.append(talk.round(case.subject.generator(40)))
    for ours, expected in zip(*rounds, strict=True):
        case.same(
            "drafts of the drafter that was saved and loaded",
            ours.logits,
            expected.logits,
            "keep whatever was learnt in parameters or buffers, so that state_dict() has it",
        )


CHECKS: list[tuple[str, Any]] = [("that it can be saved and loaded", check_saved)]
