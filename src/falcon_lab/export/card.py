"""The model card of an exported drafter: what hubs search, how it is served, how it was made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from falcon_lab.interfaces import ExportFormat, TrainedDrafter
from falcon_lab.report.page import render

TAGS = ("speculative-decoding", "draft-model")
"""Of every exported drafter."""
DRAFTER, TARGET = "DRAFTER", "TARGET"
"""Stand in a card for the folder and for the target, or their ids on the hub."""


def export_card(
    form: ExportFormat,
    trained: TrainedDrafter,
    description: Mapping[str, Any],
    card: str,
    published: str | None,
) -> str:
    """Return Markdown with a YAML head that the Hugging Face hub reads.

    Args:
        form: the format.
        trained: what was exported.
        description: of the saved drafter.
        card: of the saved drafter; what it says of making and measuring is taken over.
        published: the target's hub id; None: nobody knows one, and no path stands for it.
    """
    public = replace(trained, place=published or TARGET)
    return render(
        "export.md",
        base_model=published,
        tags=[*TAGS, *form.tags],
        engines=form.engines,
        serving=form.serving(DRAFTER, public),
        drafter=description["drafter"],
        target=description["target"],
        provenance=description["provenance"],
        measured=section(card, "Measured"),
        recipe=section(card, "Recipe"),
    )


def section(card: str, title: str) -> str:
    """Return the text of a section of a card; "" where there is none."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, re.MULTILINE | re.DOTALL)
    return "" if found is None else found[1].strip()
