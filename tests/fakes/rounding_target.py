"""A table target whose logits depend on how many tokens a pass reads, as those of bfloat16 do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fakes.table_target import TableCache, TableTarget
from falcon_lab.model.target import TargetOutput
from falcon_lab.tree import TokenTree

SPACING = 0.125


class RoundingTarget(TableTarget):
    """Rounds logits to a grid that lies elsewhere in a pass over several tokens.

    Args:
        vocab: V.
        settings: as of ``TableTarget``.
    """

    def __init__(self, vocab: int = 6, **settings: Any) -> None:
        super().__init__(vocab, **settings)
        self.dtype = torch.bfloat16

    def step(self, token: Tensor, cache: TableCache) -> TargetOutput:
        return rounded(super().step(token, cache), 0.0)

    def verify(self, tree: TokenTree, cache: TableCache) -> TargetOutput:
        shift = SPACING / 2 * torch.arange(self.vocab_size).remainder(2)
        return rounded(super().verify(tree, cache), shift if tree.nodes > 1 else 0.0)


def rounded(output: TargetOutput, shift: Tensor | float) -> TargetOutput:
    grid = ((output.logits + shift) / SPACING).round() * SPACING
    return TargetOutput(grid, output.features)
