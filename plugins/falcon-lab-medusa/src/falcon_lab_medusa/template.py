"""Medusa's published tree."""

from __future__ import annotations

from falcon_lab.interfaces import BuildContext

CHILDREN = """
:10
0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1
00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1
000:2
"""
"""``mc_sim_7b_63`` of the official code as node:children: 63 nodes, depth 4, for heads that were
measured on a 7B model."""


def mc_sim_7b_63(config: None, context: BuildContext) -> dict[str, int]:
    """Return the template, a mapping from node to child count."""
    return {node: int(count) for node, count in (e.split(":") for e in CHILDREN.split())}
