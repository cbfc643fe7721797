"""One round's acceptance, and what the host must know of it: one wait for the device.

Shapes: N tree nodes, P nodes of a padded path, M committed positions (the accepted path).

The acceptance of all rows of a round, and what the host must know of it: one wait in all.

Shapes: B rows, N tree nodes, V vocabulary, P nodes of a path that may be filled up, M committed
positions (the accepted path).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from falcon_lab.interfaces import Acceptance, AcceptanceRule, PaddedAcceptance
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a round adds to the text.

    Attributes:
        acceptance: as the rule says it.
        tokens: ``[M]`` long: the accepted draft tokens, and the one that follows them.
        listed: the same on the host.
        last: the last node of the path, where the host knows it.
    """

    acceptance: Acceptance
    tokens: Tensor
    listed: list[int]
    last: int | None


def accept(
    rule: AcceptanceRule,
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> Accepted:
    """Let a rule accept a path of a tree, and tell the host of it."""
    found = decide(rule, tree, logits, sampling, generator)
    if isinstance(found, PaddedAcceptance):
        return _told(tree, found)
    tokens = torch.cat((tree.tokens[found.path[1:]], found.next_token[None]))
    return Accepted(found, tokens, tokens.tolist(), None)


def decide(
    rule: AcceptanceRule,
    tree: TokenTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator,
) -> Acceptance | PaddedAcceptance:
    """Let a rule accept a path of a tree, without waiting for the device if it can.

    It never sees the tree's auxiliary nodes, so that none can be accepted.
    """
    if tree.auxiliary:
        tree, logits = tree.drafts, logits[: tree.drafted + 1]
    padded = rule.accept_padded(tree, logits, sampling, generator)
    return rule(tree, logits, sampling, generator) if padded is None else padded


def _told(tree: TokenTree, padded: PaddedAcceptance) -> Accepted:
    path = padded.path
    on_path = tree.tokens.index_select(0, path)
    everything = torch.cat((path, on_path, padded.next_token[None]))
    *told, following = everything.tolist()
    width = path.shape[0]
    # A path only ever goes on to larger numbers; where it stops doing so it is filled up.
    kept = 1 + sum(after > before for before, after in pairwise(told[:width]))
    tokens = torch.cat((on_path[1:kept], everything[-1:]))
    return Accepted(
        Acceptance(path[:kept], padded.next_token),
        tokens,
        [*told[width + 1 : width + kept], following],
        told[kept - 1],
    )


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
