"""The plug-in as if it were installed, tiny targets, and heads for them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab import testing
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "qwen2", "gpt2")

target = cache(partial(testing.tiny_target, vocab=12))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, *, stir: float = 0.2, **options: Any) -> Any:
    """Return heads with noise in their weights, so that their predictions differ."""
    node = {"name": "medusa", **options}
    return testing.build_drafter(of, node, components=KNOWN, seed=1, stir=stir)
