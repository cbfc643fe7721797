"""The plug-in as if it were installed, tiny targets, and exits of them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab_eesd.drafter import EesdDrafter

from falcon_lab import testing

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("gemma3", "gpt2", "llama")
VOCAB, LAYERS = 12, 4

CHAIN = {"name": "chain", "depth": 4}
BRANCHED = {"name": "static", "template": {"": 3, "0": 2, "1": 1, "00": 2}}
DYNAMIC = {"name": "dynamic", "nodes": 8, "beam": 3, "width": 3, "depth": 4}

target = cache(partial(testing.tiny_target, vocab=VOCAB, positions=128, layers=LAYERS))


def drafter(family: str = "llama", seed: int = 1, stir: float = 0.2, **options: Any) -> EesdDrafter:
    """An exit after two layers, as a rule."""
    node = {"name": "eesd", "layers": 2, **options}
    made: EesdDrafter = testing.build_drafter(
        target(family), node, components=KNOWN, seed=seed, stir=stir
    )
    return made


def engine(family: str, draft: EesdDrafter, tree: Any, controller: Any = None) -> Any:
    parts = {"tree": tree, "controller": controller, "components": KNOWN}
    return testing.engine(target(family), draft, **parts)
