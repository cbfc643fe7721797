"""The model card of an exported drafter: what hubs search, how it is served, how it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from falcon_lab.interfaces import ExportFormat, TrainedDrafter
from falcon_lab.report.page import render

TAGS = ("speculative-decoding", "draft-model")
"""Of every exported drafter."""
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
DRAFTER = "DRAFTER"
"""Stands in a card for the folder, or its id on the hub."""


def export_card(
    form: ExportFormat, trained: TrainedDrafter, description: Mapping[str, Any], card: str
) -> str:
    """Return Markdown with a YAML head that the Hugging Face hub reads.

    Args:
        form: the format.
        trained: what was exported.
        description: of the saved drafter.
        card: of the saved drafter; what it says of making and measuring is taken over.
    """
    return render(
        "export.md",
        base_model=hub_id(trained.place),
        tags=[*TAGS, *form.tags],
        engines=form.engines,
        serving=form.serving(DRAFTER, trained),
        drafter=description["drafter"],
        target=description["target"],
        provenance=description["provenance"],
        measured=section(card, "Measured"),
        recipe=section(card, "Recipe"),
    )


def hub_id(place: str) -> str | None:
    """Return a place if it is a hub id; None where it is a path."""
    return place if HUB_ID.fullmatch(place) and not Path(place).exists() else None


def section(card: str, title: str) -> str:
    """Return the text of a section of a card; "" where there is none."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[1].strip()
