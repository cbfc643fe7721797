"""Trees of a union, grown by drafters whose logits follow from the node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from everything import everything
from fakes.growing import ROOT, NodeDrafter
from falcon_lab.interfaces import Budget, BuildContext, DraftOutput, Frontier, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree
from falcon_lab.trees.union import UnionTree

Paths = list[list[int]]
Source = NodeDrafter | Paths
"""What a part drafts with: logits, or whole paths."""


def builder_of(
    trees: Sequence[dict[str, Any]], sources: Sequence[Source], nodes: int = 32
) -> UnionTree:
    """The tree builder of a union, a part of which is of each source's block."""
    blocks = [source.block if isinstance(source, NodeDrafter) else 9 for source in sources]
    host: Any = None
    parts = tuple(BuildContext(host, block) for block in blocks)
    node = {"name": "union", "parts": list(trees), "nodes": nodes}
    made: UnionTree = everything().build(
        "tree_builder", node, BuildContext(host, blocks[0], parts=parts)
    )
    return made


def context_of(
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    budget: Budget | None = None,
) -> RoundContext:
    generator = generator or torch.Generator().manual_seed(0)
    return RoundContext(torch.tensor(ROOT), budget or Budget(), sampling or Sampling(), generator)


def grow(
    builder: UnionTree, sources: Sequence[Source], context: RoundContext, passes: int = 99
) -> TokenTree:
    """A round, broken off after so many passes."""
    frontier = builder.start(context)
    for source in sources:
        if isinstance(source, NodeDrafter):
            source.asked = []
    while frontier is not None and passes:
        outputs = [
            None if own is None else output_of(source, own)
            for source, own in zip(sources, frontier.parts, strict=True)
        ]
        first = next(output for output in outputs if output is not None)
        frontier = builder.grow(DraftOutput(first.logits, parts=tuple(outputs)))
        passes -= 1
    return builder.finish()


def output_of(source: Source, frontier: Frontier) -> DraftOutput:
    """The output of a part's pass."""
    if not isinstance(source, NodeDrafter):
        return DraftOutput(torch.zeros(1, 0, 12), paths=source)
    stands = source.stands(frontier)
    source.asked.append(stands)
    return DraftOutput(torch.stack([source.logits(at) for at in stands]))
