"""What the tests of the Falcon drafter share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.drafters.falcon import FalconDrafter
from falcon_lab.interfaces import BuildContext, DrafterInputs
from falcon_lab.plugins.builtins import FalconConfig
from tiny_models import tiny_target

HIDDEN, VOCABULARY = 32, 64


def drafter(*, family: str = "llama", seed: int = 0, **options: Any) -> FalconDrafter:
    """A random drafter in evaluation mode; double precision, so that equality is sharp."""
    target = tiny_target(family)
    target.model.double()
    torch.manual_seed(seed)
    made = FalconDrafter(FalconConfig(**options), BuildContext(target)).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # no zero biases, no equal norms
    return made.requires_grad_(True)


def rows(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens [count] and features [count, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (count,), generator=generator)
    return tokens, torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)


def inputs(*lengths: int, seed: int = 0, generator: int = 0) -> DrafterInputs:
    """One packed sequence of documents of these lengths."""
    tokens, features = rows(sum(lengths), seed)
    documents = [torch.full((n,), i) for i, n in enumerate(lengths)]
    positions = [torch.arange(n) for n in lengths]
    return DrafterInputs(
        tokens=tokens[None],
        features=features[None],
        documents=torch.cat(documents)[None],
        positions=torch.cat(positions)[None],
        generator=torch.Generator().manual_seed(generator),
    )
