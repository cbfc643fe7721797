"""The model card (``README.md``) of a saved drafter, from what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from falcon_lab.report.methods import (
    FIGURES,
    IDENTICAL,
    METHOD,
    definitions,
    hardware_sentence,
    headline,
    warnings,
)
from falcon_lab.report.page import render
from falcon_lab.report.tables import Table

RECIPE = ("data", "drafter", "glancing", "objective", "distillation", "trainer", "seed")
DEFINED = ("speedup", "tau", "tau_draft", "alpha")


def drafter_card(results: Mapping[str, Any] | None, config: Mapping[str, Any]) -> str:
    """Return Markdown with a YAML head that the Hugging Face hub reads.

    Args:
        results: the content of ``results.json``; None before anything was measured.
        config: the saved drafter's ``config.json``: ``drafter`` (its node), ``provenance`` and
            ``target`` (``name``, ``fingerprint``).
    """
    data = {
        "drafter": config["drafter"],
        "target": {"revision": None, **config["target"]},
        "provenance": config.get("provenance"),
        "results": results,
        "recipe": {"drafter": config["drafter"]},
    }
    return render("card.md", **data | (_measured(results) if results else {}))


def _measured(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card shows of a measurement."""
    experiment = results["experiment"]
    evaluation = experiment.get("evaluation") or {}
    return {
        "headline": headline(results),
        "hardware": hardware_sentence(results),
        "warnings": warnings(results),
        "table": Table((METHOD, *FIGURES, IDENTICAL), list(results["methods"].values())).markdown(),
        "definitions": definitions(DEFINED),
        "evaluation": {"max_new_tokens": None, **evaluation}
        | {"prompts": {"name": None, **(evaluation.get("prompts") or {})}},
        "recipe": {key: experiment[key] for key in RECIPE if key in experiment},
    }
