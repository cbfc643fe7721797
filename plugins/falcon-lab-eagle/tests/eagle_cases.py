"""The plug-in as if it were installed, tiny targets, and EAGLE's heads for them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from falcon_lab import testing
from falcon_lab.interfaces import DrafterInputs
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("gemma3", "gpt2", "llama")
VOCAB, HIDDEN = 12, 32
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"name": "eagle"},
    "eagle3": {"name": "eagle3"},
    "eagle3-own": {"name": "eagle3", "taps": [1, 3], "head": "own"},
    "fspad": {"name": "fspad"},
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"name": "chain", "depth": 4},
    "dynamic": {"name": "dynamic", "nodes": 8, "beam": 3, "width": 3, "depth": 4},
    "eagle1": {"name": "static", "template": "eagle1"},
    "eagle2": {"name": "dynamic", "nodes": 60, "beam": 10, "width": 10, "depth": 7},
}

target = cache(partial(testing.tiny_target, vocab=VOCAB, layers=4))
engine = partial(testing.engine, components=KNOWN)


def drafter(name: str = "eagle", *, on: Target | None = None) -> Any:
    """A fresh head, its weights moved about."""
    return testing.build_drafter(on or target(), HEADS[name], components=KNOWN, seed=3, stir=0.1)


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def inputs(made: Any, *lengths: int) -> DrafterInputs:
    """Rows of packed documents, as training gives them."""
    whole = testing.packed([text(sum(lengths) + 1).split([*lengths[:-1], lengths[-1] + 1])])
    return testing.training_inputs(made.host, made, whole, torch.Generator())
