"""Equal budgets: what a word such as ``tree-32`` stands for. Imports no torch.

A budget limits what the target verifies in a round. How a head fills it is its own affair, so a
tree goes where the head is surest, by one rule for all of them: EAGLE-2's (``trees/dynamic.py``)
with N nodes, paths of up to ``DEPTH``, and a beam and width of √N, which lies between this
repository's default (16 nodes, 4) and EAGLE-2's own (60 nodes, 10). A tree drawn by hand would
favour the head that it was drawn for, and ``optimal`` has no beam, so that a head with k = 1 would
pay for N blocks a pass. Depth counts tokens, not passes: a head with a larger k reaches it in fewer
passes, which is what it was built for; the head's controller may stop before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import sqrt

from falcon_lab.config.schema import Node
from falcon_lab.errors import ConfigError, did_you_mean

OWN, BEST = "own", "best"
DEPTH = 8
"""Longest path of ``tree-N``, that of the paper's trees for k = 2."""
KNOWN = ("chain-4", "tree-16", OWN, BEST)
"""What is suggested for a word that is none."""


@dataclass(frozen=True)
class NodeBudget:
    """A word of ``budgets``.

    Attributes:
        word: as it is written.
        nodes: most draft tokens of a round; None for ``own`` and ``best``.
    """

    word: str
    nodes: int | None = None

    def tree(self, own: Node) -> Node:
        """Return the tree builder's node; ``own`` is the head's."""
        if self.nodes is None:
            return own
        if self.word.startswith("chain"):
            return {"name": "chain", "depth": self.nodes}
        side = max(2, round(sqrt(self.nodes)))
        return {
            "name": "dynamic",
            "nodes": self.nodes,
            "beam": side,
            "width": side,
            "depth": min(DEPTH, self.nodes),
        }


def parse_budget(word: str, key: str) -> NodeBudget:
    """Read ``chain-D``, ``tree-N``, ``own`` or ``best``.

    Raises:
        ConfigError: at ``key``, for any other word.
    """
    if word in (OWN, BEST):
        return NodeBudget(word)
    found = re.fullmatch(r"(chain|tree)-([1-9]\d*)", word)
    if found is None:
        hint = did_you_mean(word, KNOWN)
        raise ConfigError(key, f"no budget {word!r}: write chain-D, tree-N, own or best{hint}")
    return NodeBudget(word, int(found[2]))
