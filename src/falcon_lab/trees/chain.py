"""A chain: the tree without branches."""

from __future__ import annotations

from typing import cast

from falcon_lab.builtins import ChainConfig
from falcon_lab.protocols import BuildContext, Proposal
from falcon_lab.trees.template_tree import TemplateTree


class Chain(TemplateTree):
    """One path of ``config.depth`` draft tokens; of depth 0 it is the root alone.

    Args:
        config: the length, and how tokens are chosen at T > 0.
        context: gives k.
    """

    def __init__(self, config: ChainConfig, context: BuildContext) -> None:
        paths = [(0,) * length for length in range(1, context.reach(config.depth) + 1)]
        super().__init__(paths, context.block, cast(Proposal, config.proposal))
