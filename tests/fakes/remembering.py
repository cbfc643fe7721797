"""A drafter that knows several texts and says the same whenever it stands at the same place.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakes.drafters import RandomDrafter


class RememberingDrafter(RandomDrafter):
    """Often gives the right token of the text that it is in a good rank.

    Args:
        vocab: V.
        block: k.
        texts: prompts and what follows them.
        seed: of what it says.
        right: how often it knows.
    """

    def __init__(
        self,
        vocab: int,
        block: int,
        texts: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        right: float = 0.9,
    ) -> None:
        super().__init__(vocab, block, seed=seed)
        self.texts = [list(text) for text in texts]
        self.seed = seed
        self.right = right

    def logits(self, blocks: int) -> Tensor:
        self.generator.manual_seed(
            self.seed + 101 * len(self.text) + 10_007 * self.passes + 1_000_003 * self.text[-1]
        )
        logits = super().logits(blocks)
        text = next((t for t in self.texts if t[: len(self.text)] == self.text), [])
        for row in range(self.block):
            place = len(self.text) + self.passes * self.block + row
            chance, rank = torch.rand(2, generator=self.generator).tolist()
            if place < len(text) and chance < self.right:
                level = logits[:, row].topk(4).values[:, int(3 * rank**2)]
                logits[:, row, text[place]] = level + 1e-3
        return logits
