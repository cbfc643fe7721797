"""The acceptance of a round, and what the host must know of it: one wait for the device in all.

Shapes: N tree nodes, V vocabulary, P nodes of a path that may be padded, M committed positions
(the accepted path).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from falcon_lab.interfaces import Acceptance, AcceptanceRule, PaddedAcceptance
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree


class Accepted:
    """What a round adds to a sequence, on the host and on the device.

    Attributes:
        path: nodes from the root to the last accepted one.
        listed: the accepted draft tokens and the one that follows them.
        nodes: ``[M]`` long, the path.
        tokens: ``[M]`` long, what is listed.
    """

    __slots__ = ("listed", "nodes", "path", "tokens")

    def __init__(self, decided: Tensor, values: list[int]) -> None:
        """Read ``[2P + 1]``: the path, the tokens along it and the next one; and as a list."""
        width = len(values) // 2
        # The numbers of a path increase; from where they stop doing so it is padding.
        length = 1 + sum(after > before for before, after in pairwise(values[:width]))
        self.path = values[:length]
        self.listed = [*values[width + 1 : width + length], values[-1]]
        self.nodes = decided[:length]
        self.tokens = decided[width + 1 :]
        if length < width:
            self.tokens = torch.cat((self.tokens[: length - 1], self.tokens[-1:]))

    @property
    def acceptance(self) -> Acceptance:
        """The same as a rule puts it."""
        return Acceptance(self.nodes, self.tokens[-1])


def accept(
    rules: Sequence[AcceptanceRule],
    trees: Sequence[TokenTree],
    logits: Sequence[Tensor],
    draws: Sequence[tuple[Sampling, torch.Generator]],
) -> list[Accepted]:
    """Let every sequence's rule accept a path of its tree; ``[N, V]`` logits each."""
    decided = []
    for rule, tree, of_tree, (sampling, generator) in zip(rules, trees, logits, draws, strict=True):
        found = _decide(rule, tree, of_tree, sampling, generator)
        on_path = tree.tokens.index_select(0, found.path)
        decided.append(torch.cat((found.path, on_path, found.next_token[None])))
    if len(decided) == 1:
        return [Accepted(decided[0], decided[0].tolist())]
    values = torch.cat(decided).tolist()
    ends = [0]
    for one in decided:
        ends.append(ends[-1] + one.shape[0])
    return [
        Accepted(one, values[first:last])
        for one, (first, last) in zip(decided, pairwise(ends), strict=True)
    ]


def _decide(
    rule: AcceptanceRule,
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> Acceptance | PaddedAcceptance:
    """Let a rule accept a path of a tree, without waiting for the device if it can.

    It is never given the tree's auxiliary nodes, so that none can be accepted.
    """
    if tree.auxiliary:
        tree, logits = tree.drafts, logits[: tree.drafted + 1]
    padded = rule.accept_padded(tree, logits, sampling, generator)
    return rule(tree, logits, sampling, generator) if padded is None else padded
