"""Auto-correct decoding (arXiv 2402.11809): a tuned target reads draft tokens and masks at once.

Behind every node of the tree stand k mask tokens, which say what the target expects k + 1 steps
below it. One pass verifies the draft, and those behind the last accepted token are the next one.

Shapes: C tree nodes, k masks behind each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from falcon_lab.drafters.positions_behind import PositionsBehind
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext
from falcon_lab.tree import Entrance
from falcon_lab_space import SpaceConfig
from falcon_lab_space.tuner import MASKS


class Space(PositionsBehind):
    """k mask tokens behind every node, of a target that was tuned to answer them.

    Attributes:
        block: k.

    Args:
        config: the options.
        context: gives the target.

    Raises:
        FalconLabError: the target has no mask token.
    """

    def __init__(self, config: SpaceConfig, context: BuildContext) -> None:
        host: Any = context.host
        name = config.mask_token or host.tokenizer.mask_token
        token = None if name is None else host.tokenizer.get_vocab().get(name)
        if token is None or token >= host.vocab_size:
            raise FalconLabError(
                "drafter space needs a target that answers mask tokens, and this one has "
                f"{'none' if name is None else f'no {name!r}'}; tune it with "
                "target.tune.name=sar_sft"
            )
        self.block = config.block or int(getattr(host.config, MASKS, 1))
        self.vocab_size = host.vocab_size
        self._mask = token

    def read_behind(self, nodes: int, most: int) -> tuple[Tensor, Entrance | None]:
        """Return mask tokens."""
        return torch.full((nodes * most,), self._mask), None
