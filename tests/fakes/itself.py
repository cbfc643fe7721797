"""A drafter that is the target itself, for any k, as good as it is configured to be.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import Drafter, DraftOutput, Frontier, Observation


class TargetItself(Drafter):
    """Row j is the target's next token after the path and the target's own j tokens behind it.

    What it says depends on the tokens before alone, never on how often it was asked.

    Args:
        target: the model.
        block: k.
        noise: of the logits; 0 makes every first candidate right.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: Any, block: int, noise: float = 0.0) -> None:
        self.target = target
        self.block = block
        self.noise = noise
        self.text: list[int] = []
        self.paths: list[list[int]] = []
        self._known: dict[tuple[int, ...], Tensor] = {}

    def reset(self, first: Tensor) -> None:
        self.text = [int(first)]

    def observe(self, observation: Observation) -> None:
        self.text += observation.tokens.tolist()
        self.paths = [[]]

    def draft(self, frontier: Frontier) -> DraftOutput:
        below = zip(frontier.parents.tolist(), frontier.tokens.tolist(), strict=True)
        self.paths = [self.paths[max(parent, 0)] + tokens for parent, tokens in below]
        return DraftOutput(torch.stack([self._rows(self.text + path) for path in self.paths]))

    def _rows(self, text: list[int]) -> Tensor:
        rows = []
        for _ in range(self.block):
            logits = self._logits(text)
            generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
            rows.append(logits + self.noise * torch.randn(logits.shape, generator=generator))
            text = [*text, int(logits.argmax())]
        return torch.stack(rows)

    def _logits(self, text: list[int]) -> Tensor:
        key = tuple(text)
        if key not in self._known:
            tokens = torch.tensor(text)
            cache = self.target.new_cache(len(text))
            self._known[key] = self.target.prefill(tokens, cache).logits[-1]
        return self._known[key]
