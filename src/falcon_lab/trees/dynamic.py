"""A tree that goes where the drafter is sure: EAGLE-2's, for any block size."""

from __future__ import annotations

from falcon_lab.builtins import DynamicTreeConfig
from falcon_lab.protocols import BuildContext
from falcon_lab.trees.best_first import BestFirstTree
from falcon_lab.trees.templates import default_depth


class DynamicTree(BestFirstTree):
    """Expand the best blocks of every pass, then rerank all candidates (arXiv 2406.16858, §4).

    A pass expands the ``beam`` nodes of the highest cumulative probability among those that the
    pass before put at its last depth; every row gives ``width`` candidates; the ``nodes`` best of
    all make the tree. With k = 1 that is EAGLE-2. With more, a pass adds k levels, the candidates
    of a row being shared by all nodes of the block at that depth.

    Args:
        config: the limits.
        context: gives k.
    """

    def __init__(self, config: DynamicTreeConfig, context: BuildContext) -> None:
        block = context.block
        depth = default_depth(block) if config.depth is None else config.depth
        super().__init__(
            block,
            nodes=config.nodes,
            depth=context.reach(depth),
            beam=config.beam,
            width=config.width,
        )
