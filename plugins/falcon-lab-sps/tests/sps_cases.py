"""The plug-in as if it were installed, tiny targets, draft models for them, and texts of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from falcon_lab_sps.drafter import SpsDrafter
from torch import Tensor

from falcon_lab import testing
from falcon_lab.interfaces import Frontier, Observation

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("gemma3", "gpt2", "llama")
VOCAB, POSITIONS = 12, 128
ROOT = Frontier.root(torch.device("cpu"))

target = cache(partial(testing.tiny_target, vocab=VOCAB, positions=POSITIONS))


def drafter(family: str = "llama", seed: int = 1, stir: float = 0.2, **options: Any) -> SpsDrafter:
    """A fresh draft model whose weights are large too."""
    made: SpsDrafter = testing.build_drafter(
        target(family), {"name": "sps", **options}, components=KNOWN, seed=seed, stir=stir
    )
    return made


def engine(family: str, draft: SpsDrafter, tree: Any, controller: Any = None) -> Any:
    parts = {"tree": tree, "controller": controller, "components": KNOWN}
    return testing.engine(target(family), draft, **parts)


def tell(draft: SpsDrafter, text: Sequence[int], remaining: int = 0) -> None:
    draft.observe(Observation(torch.tensor(text, dtype=torch.long), None, remaining))


@torch.no_grad()
def uncached(draft: SpsDrafter, text: Sequence[int]) -> Tensor:
    """Return logits ``[V]`` after a text, read from the start in one pass without a cache."""
    first = 1 if draft.config.model is None else 0
    tokens = torch.tensor([text[first:]])
    positions = torch.arange(first, len(text))[None]
    mask = torch.ones(1, len(text) - first, len(text) - first, dtype=torch.bool).tril()
    hidden = draft.model(tokens=tokens, positions=positions, mask=mask)
    return draft.model.logits(hidden)[0, -1]
