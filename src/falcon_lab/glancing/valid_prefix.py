"""The valid-prefix mask: a block's rows teach as far as decoding would have used them.

SpecBlock drops the loss of the later positions of a block once an earlier one is wrong: decoding
throws them away, since the token that they are to follow was refused.

Shapes: B batch, R prediction rows, G blocks of the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.distillation.blocks import number_blocks
from falcon_lab.errors import FalconLabError
from falcon_lab.protocols import BuildContext, ChoosesRows, GlanceRows, GlancingSchedule

if TYPE_CHECKING:
    from falcon_lab.builtins import ValidPrefixConfig


class ValidPrefix:
    """The schedule of ``ValidPrefixConfig``: another one's glances, and the mask."""

    def __init__(self, config: ValidPrefixConfig, context: BuildContext) -> None:
        if context.components is None:
            raise FalconLabError("valid_prefix is built by the registry, which knows its schedule")
        inner: GlancingSchedule = context.components.build("schedule", config.schedule, context)
        self._inner = inner
        self.token_source = inner.token_source
        self.keep_revealed_in_loss = inner.keep_revealed_in_loss

    def ratio(self, progress: float) -> float:
        """As the schedule within."""
        return self._inner.ratio(progress)

    def reveal(self, rows: GlanceRows, ratio: float, generator: torch.Generator) -> Tensor:
        """As the schedule within."""
        return self._inner.reveal(rows, ratio, generator)

    def counts(self, rows: GlanceRows) -> Tensor:
        """``[B, R]`` bool: rows that no wrong row of their block comes before.

        A block's first wrong row itself counts: it is where there is something to learn.
        """
        valid = rows.valid
        if isinstance(self._inner, ChoosesRows):
            valid = self._inner.counts(rows)
        number, sequence = number_blocks(rows.group)
        place = torch.where(rows.wrong & rows.valid, rows.slot, rows.block)
        first = place.new_full((sequence.shape[0],), rows.block)
        first.scatter_reduce_(0, number.flatten(), place.flatten(), "amin")
        return valid & (rows.slot <= first[number])
