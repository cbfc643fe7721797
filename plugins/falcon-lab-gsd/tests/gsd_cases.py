"""The plug-in and its drafters as if they were installed, tiny targets, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from falcon_lab import testing
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.distributions import registered
from falcon_lab.testing.reference import ReferenceLogits, Tokens

FOLDER = Path(__file__).parents[1]
DRAFTERS = [FOLDER.parent / f"falcon-lab-{name}" for name in ("sps", "selfspec")]
OWN = testing.components_of(FOLDER).components
NEEDED = [one for folder in DRAFTERS for one in registered(folder)]
BROUGHT = {one.distribution for one in NEEDED}
KNOWN = Components([*(one for one in OWN if one.distribution not in BROUGHT), *NEEDED])
FAMILIES = ("llama", "gpt2", "gemma3")
ALL = {"prob_threshold": 0.0, "sibling_threshold": 0.0}
"""Nothing is left out but by its rank."""

target = cache(partial(testing.tiny_target, vocab=12, layers=3))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, name: str = "sps", **options: Any) -> Any:
    """A draft model with random weights, or another drafter."""
    node = {"name": name, **options}
    return testing.build_drafter(of, node, components=KNOWN, seed=1, stir=0.2)


class Markov(ReferenceLogits):
    """Logits that follow from the newest two tokens, the root's among them."""

    def logits(self, node: Tokens) -> Tensor:
        return ReferenceLogits.logits(self, (7, *node)[-2:])


@torch.no_grad()
def read_whole(draft: Any, text: Sequence[int]) -> Tensor:
    """Return a draft model's logits ``[V]`` after a text, in one pass without a cache."""
    tokens, positions = torch.tensor([text[1:]]), torch.arange(1, len(text))[None]
    mask = torch.ones(1, len(text) - 1, len(text) - 1, dtype=torch.bool).tril()
    logits: Tensor = draft.model.logits(draft.model(tokens=tokens, positions=positions, mask=mask))
    return logits[0, -1]
