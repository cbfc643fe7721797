"""One round's acceptance, and what the host must know of it: one wait for the device.

Shapes: N tree nodes, P nodes of a padded path, M committed positions (the accepted path).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from falcon_lab.decoding.sampling import Sampling
from falcon_lab.protocols import Acceptance, AcceptanceRule, AcceptsOnDevice, PaddedAcceptance
from falcon_lab.trees.token_tree import TokenTree


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

    It never sees the tree's probes, so that none can be accepted.
    """
    if tree.probes:
        tree, logits = tree.drafts, logits[: tree.drafted + 1]
    if decides_on_device(type(rule)):
        padded = cast(AcceptsOnDevice, rule).accept_padded(tree, logits, sampling, generator)
        if padded is not None:
            return padded
    return rule(tree, logits, sampling, generator)


@cache
def decides_on_device(kind: type) -> bool:
    """Whether rules of a class have ``accept_padded``, and it is about their own decision.

    One that was inherited together with a decision which was written anew is about another one.
    """
    for each in kind.__mro__:
        if "accept_padded" in vars(each):
            return True
        if "__call__" in vars(each):
            return False
    return False


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
