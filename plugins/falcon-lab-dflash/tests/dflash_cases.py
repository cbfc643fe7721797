"""The plug-in as if it were installed, tiny targets, and a drafter for them."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from falcon_lab import testing
from falcon_lab.interfaces import DrafterInputs, Observation
from falcon_lab.model.target import Target

FOLDER = Path(__file__).parents[1]
KNOWN = testing.components_of(FOLDER)
FAMILIES = ("llama", "qwen2", "gpt2")
TEXT = torch.randint(0, 12, (2, 20), generator=torch.Generator().manual_seed(3))
WHOLE = [[row] for row in TEXT]
SPLIT = [[row[:8], row[8:]] for row in TEXT]

target = cache(partial(testing.tiny_target, vocab=12, layers=3))
engine = partial(testing.engine, components=KNOWN)


def drafter(of: Target, **options: Any) -> Any:
    node = {"name": "dflash", "block": 3, **options}
    return testing.build_drafter(of, node, components=KNOWN, seed=1)


def inputs(of: Target, made: Any, *texts: list[torch.Tensor]) -> DrafterInputs:
    """Rows of packed documents, as training gives them."""
    return testing.training_inputs(
        of, made, testing.packed(texts), torch.Generator().manual_seed(0)
    )


def seen(rows: DrafterInputs, sequence: int, start: int, stop: int) -> Observation:
    """Rows of one sequence, as decoding gives them."""
    assert rows.taps is not None
    part = slice(start, stop)
    return Observation(rows.tokens[sequence, part], None, 0, rows.taps[sequence, part])
