"""The likeliest tree of a given size, by the drafter's own factorised probabilities."""

from __future__ import annotations

from falcon_lab.builtins import OptimalTreeConfig
from falcon_lab.protocols import BuildContext
from falcon_lab.trees.best_first import BestFirstTree
from falcon_lab.trees.templates import default_depth


class OptimalTree(BestFirstTree):
    """The ``nodes`` paths of the highest probability among all paths of ``passes`` passes.

    A block's rows are taken as independent of each other, so a path's probability is a product of
    one entry per row; over one pass that is the draft tree of a block-diffusion drafter (DDTree).
    If the drafter's probabilities were the target's, no tree of that size and depth would have more
    tokens accepted. Every node that could have one of the best below it is expanded, and every
    candidate that could be one is looked at, so nothing is approximated; a pass may take up to
    ``nodes`` blocks, though it rarely takes more than a few.

    Args:
        config: the size, and the passes.
        context: gives k.
    """

    def __init__(self, config: OptimalTreeConfig, context: BuildContext) -> None:
        block, passes = context.block, config.passes
        depth = default_depth(block) if passes is None else passes * block
        nodes = config.nodes
        reach = context.reach(depth)
        super().__init__(block, nodes=nodes, depth=reach, beam=nodes, width=nodes)
