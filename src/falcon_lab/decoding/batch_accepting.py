"""The acceptance of all rows of a round, and what the host must know of it: one wait in all.

Shapes: B rows, N tree nodes, V vocabulary, P nodes of a path that may be filled up, M committed
positions (the accepted path).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from falcon_lab.decoding.accepting import decide
from falcon_lab.decoding.sampling import Sampling
from falcon_lab.protocols import AcceptanceRule
from falcon_lab.trees.token_tree import TokenTree


class RowAccepted:
    """What a round adds to a row's text.

    Attributes:
        path: nodes from the root to the last accepted one, on the host.
        listed: the accepted draft tokens and the one that follows them, on the host.
        nodes: ``[M]`` long, the path.
        tokens: ``[M]`` long, what is listed.
    """

    def __init__(self, decided: Tensor, told: list[int]) -> None:
        """From ``[2P + 1]`` path, tokens along it and the next one; here and on the host."""
        width = len(told) // 2
        # A path only ever goes on to larger numbers; where it stops doing so it is filled up.
        kept = 1 + sum(after > before for before, after in pairwise(told[:width]))
        self.path = told[:kept]
        self.listed = [*told[width + 1 : width + kept], told[-1]]
        self.nodes = decided[:kept]
        self.tokens = torch.cat((decided[width + 1 : width + kept], decided[-1:]))


def accept_rows(
    rules: Sequence[AcceptanceRule],
    trees: Sequence[TokenTree],
    logits: Sequence[Tensor],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> list[RowAccepted]:
    """Let every row's rule accept a path of its tree; ``[N, V]`` logits each."""
    decided = []
    for rule, tree, of_tree, generator in zip(rules, trees, logits, generators, strict=True):
        found = decide(rule, tree, of_tree, sampling, generator)
        on_path = tree.tokens.index_select(0, found.path)
        decided.append(torch.cat((found.path, on_path, found.next_token[None])))
    told = torch.cat(decided).tolist()
    ends = [0]
    for one in decided:
        ends.append(ends[-1] + one.shape[0])
    return [
        RowAccepted(one, told[first:last])
        for one, (first, last) in zip(decided, pairwise(ends), strict=True)
    ]
