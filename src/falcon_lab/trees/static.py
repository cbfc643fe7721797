"""A tree drawn by hand or ahead of time: the same shape every round."""

from __future__ import annotations

from typing import cast

from falcon_lab.builtins import StaticConfig
from falcon_lab.protocols import BuildContext, Proposal
from falcon_lab.trees.template_tree import TemplateTree
from falcon_lab.trees.templates import cut, resolve


class StaticTree(TemplateTree):
    """Falcon's custom-designed decoding tree (arXiv 2412.12639, §3.4), for any k.

    Args:
        config: the template and how tokens are chosen at T > 0.
        context: gives k.

    Raises:
        FalconLabError: the template has duplicates, gaps or orphans, or its name is unknown.
    """

    def __init__(self, config: StaticConfig, context: BuildContext) -> None:
        paths = resolve(config.template, context)
        depths = [depth for depth in (config.max_depth, context.deepest) if depth is not None]
        paths = cut(paths, context.block, depth=min(depths, default=None))
        super().__init__(paths, context.block, cast(Proposal, config.proposal))
