"""The plug-in as if it were installed, tiny targets of six layers, and draft models for them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from falcon_lab import testing
from falcon_lab.testing.targets import tiny_model, tiny_tokenizer

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("gemma3", "gpt2", "llama")
VOCAB, LAYERS = 12, 6
CHAIN = {"name": "chain", "depth": 4}
BRANCHED = {"name": "static", "template": {"": 2, "0": 2, "00": 1}}

target = cache(partial(testing.tiny_target, vocab=VOCAB, layers=LAYERS, positions=96))


def saved(folder: Path, family: str = "llama", layers: int = LAYERS) -> str:
    """Save a draft model that differs little from the target, and return its folder."""
    model = tiny_model(family, vocab=VOCAB, layers=layers, positions=96)
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB).save_pretrained(folder)
    return str(folder)


def drafter(family: str = "llama", **options: Any) -> Any:
    node = {"name": "easyspec", **options}
    return testing.build_drafter(target(family), node, components=KNOWN)


def engine(family: str = "llama", tree: Any = None, **options: Any) -> Any:
    """Return an engine of the drafter with these options."""
    return testing.engine(
        target(family), drafter(family, **options), tree=tree or CHAIN, components=KNOWN
    )
