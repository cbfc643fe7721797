"""The plug-in as if it were installed, and tiny targets."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab import testing
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "gpt2", "gemma3")
EVERYTHING = {"threshold": -1.0, "first": 1, "last": 1, "warmup": 0}
"""All that may be skipped is, behind the first hot layer."""

target = cache(partial(testing.tiny_target, vocab=12, layers=5))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, **options: Any) -> Any:
    """Return the drafter."""
    return testing.build_drafter(of, {"name": "ffn_skip", **options}, components=KNOWN)
