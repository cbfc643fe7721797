"""The plug-in as if it were installed, tiny targets, and heads for them."""

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
VOCAB = 12

target = cache(partial(testing.tiny_target, vocab=VOCAB))
engine = partial(testing.engine, components=KNOWN)


def drafter(name: str, on: Target | None = None, *, stir: float = 0.2, **options: Any) -> Any:
    """Return heads with noise in their weights, so that their predictions differ."""
    node = {"name": name, **options}
    return testing.build_drafter(on or target(), node, components=KNOWN, seed=1, stir=stir)


def text(count: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def inputs(made: Any, *lengths: int) -> DrafterInputs:
    """Rows of packed documents, as training gives them."""
    whole = testing.packed([text(sum(lengths) + 1).split([*lengths[:-1], lengths[-1] + 1])])
    return testing.training_inputs(made.host, made, whole, torch.Generator())
