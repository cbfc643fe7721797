"""The plug-in as if it were installed, and tiny targets of four layers."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab import testing

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("gemma3", "gpt2", "llama")
VOCAB, LAYERS = 12, 4
CHAIN = {"name": "chain", "depth": 4}

target = cache(partial(testing.tiny_target, vocab=VOCAB, layers=LAYERS, positions=96))


def engine(family: str = "llama", tree: Any = None, controller: Any = None, **options: Any) -> Any:
    """Return an engine of the drafter with these options."""
    node = {"name": "selfspec", **options}
    drafter = testing.build_drafter(target(family), node, components=KNOWN)
    parts = {"tree": tree or CHAIN, "controller": controller, "components": KNOWN}
    return testing.engine(target(family), drafter, **parts)
