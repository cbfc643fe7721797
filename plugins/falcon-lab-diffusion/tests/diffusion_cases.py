"""The plug-in as if it were installed, tiny targets, and masked models for them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab import testing
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "gpt2", "gemma3")
PROMPTS = [[5], [3, 1, 4, 1, 5, 9]]

target = cache(partial(testing.tiny_target, vocab=12))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, *, stir: float = 0.2, **options: Any) -> Any:
    """Return a masked model with noise in its weights."""
    node = {"name": "diffusion", "block": 4, **options}
    return testing.build_drafter(of, node, components=KNOWN, seed=1, stir=stir)
