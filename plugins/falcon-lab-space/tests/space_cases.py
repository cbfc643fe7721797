"""The plug-in as if it were installed, tiny targets, and one that has learnt to answer masks."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from falcon_lab_space import SarSftConfig
from falcon_lab_space.tuner import SarSft

from falcon_lab import testing
from falcon_lab.interfaces import TargetContext, TuningBatch
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "gpt2", "gemma3")
MASK = "<unk>"
"""A token that the tiny targets have and texts have not."""

target = cache(partial(testing.tiny_target, vocab=12, layers=3))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, **options: Any) -> Any:
    """Build the drafter, on a token that stands in for the mask token of a tuned target."""
    node = {"name": "space", "mask_token": MASK, "block": 3, **options}
    return testing.build_drafter(of, node, components=KNOWN)


def tuner(**options: Any) -> SarSft:
    """Build the tuner."""
    return SarSft(SarSftConfig(**{"length": 24, **options}), TargetContext(lambda line: None))


def tuning_batch(texts: torch.Tensor, seed: int = 0) -> TuningBatch:
    """Make a batch of ``[B, T]`` tokens, a document each."""
    batch = testing.packed([[text] for text in texts])
    generator = torch.Generator().manual_seed(seed)
    return TuningBatch(batch.tokens, batch.loss_mask, batch.documents, batch.positions, generator)


@cache
def tuned(weights: str = "full", steps: int = 60) -> tuple[Target, torch.Tensor]:
    """Return a target that was tuned on a few texts of its own, and these."""
    parent = testing.tiny_target(vocab=16, layers=2, positions=64)
    texts = testing.own_texts(parent)
    model, tokenizer = copy.deepcopy(parent.model), copy.deepcopy(parent.tokenizer)
    made = tuner(masks=2, positions=24, weights=weights, rank=8)
    trained = made.begin(model, tokenizer)
    learnt = [weight for weight in trained.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=5e-3 if weights == "full" else 2e-2)
    for step in range(steps):
        terms = made.losses(tuning_batch(texts, step)).values()
        loss = torch.stack([total for total, _ in terms]).sum() / sum(count for _, count in terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Target(made.finish(), tokenizer, name="tuned"), texts
