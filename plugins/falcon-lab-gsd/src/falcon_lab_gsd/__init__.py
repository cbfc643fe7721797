"""Graph-structured drafting (arXiv 2407.16207). Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["GsdConfig", "register_components"]


@dataclass
class GsdConfig:
    """Configure the draft graph and the tree that it is unrolled into."""

    nodes: int = ranged(100, least=1, most=10**6)
    """Most nodes of the unrolled tree, and most blocks of a pass."""
    depth: int = ranged(8, least=1, most=1000)
    """Longest path of the unrolled tree, and most passes."""
    width: int = ranged(4, least=1, most=10**6)
    """Candidates of a node that are looked at."""
    repeat_threshold: int | None = ranged(1, least=0, most=1000)
    """R: a candidate is merged with a node of the same token when the R tokens before it agree too;
    null never merges, which makes the graph a tree."""
    prob_threshold: float = ranged(0.3, least=0, most=1)
    """A candidate that is less likely than this is drafted, and nothing below it."""
    sibling_threshold: float = ranged(0.2, least=0, most=1)
    """A candidate that is less likely than this share of the likeliest one is left out."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the tree builder."""
    register.tree_builder("gsd", "falcon_lab_gsd.graph:GsdTree", config=GsdConfig)
