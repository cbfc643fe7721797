"""Trees of several drafters as one: joined where they begin alike, and cut to a number of nodes.

At temperatures above 0 a node is either drawn from a known q or chosen, and the acceptance rule
tries the drawn children of a node first (``acceptance.accept_sampled``). Three things keep that
lossless, whatever the trees are:

- A token that one part has drawn and another has chosen is drawn: refused, it has no probability
  left, so that to choose it after that would add nothing.
- What two parts have drawn is the first one's. The second one's q is then q on the condition that
  none of the first one's tokens is drawn, which is what the rest of its draws follow: they come
  after the first one's were refused, and are draws from that q whatever came of the others.
- Every drawn node is kept. Which nodes a tree is cut to depends on what was drawn, and draws that
  are kept for their value are no draws from q. What was chosen may depend on all draws, as these
  have been refused when the one-hot rule draws anew.

Shapes: N nodes of a tree, R draft distributions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.tree import CHOSEN, Proposal, TokenTree, listed_tree


@dataclass(frozen=True, slots=True)
class Claim:
    """What one part says about a node.

    Attributes:
        part: which.
        node: in that part's own tree.
        log_q: its log-probability there.
        q_row: what it was drawn from there, or ``CHOSEN``.
    """

    part: int
    node: int
    log_q: float
    q_row: int


@dataclass(slots=True)
class MergedNode:
    """A node of the merged tree.

    Attributes:
        token: what it proposes.
        parent: its parent's number; -1 for the root.
        depth: 0 for the root.
        claims: of the parts that have it, in their order.
        reach: how likely it is accepted, its ancestors among it.
    """

    token: int
    parent: int
    depth: int
    claims: list[Claim] = field(default_factory=list)
    reach: float = 1.0

    @property
    def draw(self) -> Claim | None:
        """Return the claim of the part that drew it first; None: it was chosen."""
        return next((claim for claim in self.claims if claim.q_row != CHOSEN), None)

    @property
    def place(self) -> tuple[bool, int, int]:
        """Return where it stands among its siblings: drawn ones first, in the order of draws."""
        claim = self.draw or self.claims[0]
        return self.draw is None, claim.part, claim.node


Chance = Callable[[Sequence[Claim], int], float]
"""Claims about a node, and its depth -> how likely it is accepted where its parent was."""


def joined(trees: Sequence[TokenTree], chance: Chance) -> list[MergedNode]:
    """Join trees of one root where they begin alike; parents come before their children."""
    nodes = [MergedNode(int(trees[0].tokens[0]), -1, 0)]
    below: dict[tuple[int, int], int] = {}
    for part, tree in enumerate(trees):
        number = [0]
        rows = [CHOSEN] * tree.nodes if tree.q_row is None else tree.q_row.tolist()
        known = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.log_q.tolist(), strict=True)
        for node, (token, above, log_q) in enumerate(known):
            if above < 0:
                continue
            parent = number[above]
            at = below.setdefault((parent, token), len(nodes))
            if at == len(nodes):
                nodes.append(MergedNode(token, parent, nodes[parent].depth + 1))
            nodes[at].claims.append(Claim(part, node, min(log_q, 0.0), rows[node]))
            number.append(at)
    for each in nodes[1:]:
        each.reach = nodes[each.parent].reach * chance(each.claims, each.depth)
    return nodes


def cut(nodes: Sequence[MergedNode], most: int) -> list[int]:
    """Return the numbers of the nodes to keep: all drawn ones, and the likeliest of the others.

    They are in the order of a ``TokenTree``, the root first.

    Raises:
        FalconLabError: more than ``most`` were drawn.
    """
    kept = {0}
    for number, node in enumerate(nodes):
        above = number
        while node.draw is not None and above not in kept:
            kept.add(above)
            above = nodes[above].parent
    if len(kept) - 1 > most:
        raise FalconLabError(
            f"the trees of a union have {len(kept) - 1} drawn nodes for {most} places, and drawn "
            "ones cannot be left out; a tree builder that draws must say so (proposal) and keep "
            "to the nodes of its budget"
        )
    others = sorted(
        (number for number in range(len(nodes)) if number not in kept),
        key=lambda number: (-nodes[number].reach, nodes[number].depth),
    )
    kept |= {*others[: most + 1 - len(kept)]}
    order, level = [0], [0]
    while level:
        level = [
            number
            for parent in level
            for number in sorted(
                (each for each in kept if nodes[each].parent == parent and each),
                key=lambda each: nodes[each].place,
            )
        ]
        order += level
    return order


def merged_tree(
    root: Tensor, nodes: Sequence[MergedNode], order: Sequence[int], trees: Sequence[TokenTree]
) -> TokenTree:
    """Return the tree of the nodes in ``order``; their draws are those of ``trees``."""
    number = {at: place for place, at in enumerate(order)}
    kept = [nodes[at] for at in order[1:]]
    tree = listed_tree(
        root,
        [node.token for node in kept],
        [number[node.parent] for node in kept],
        [node.claims[0].log_q for node in kept],
    )
    if all(node.draw is None for node in kept):
        return tree
    q: list[Tensor] = []
    q_row, log_q = torch.full_like(tree.parents, CHOSEN), tree.log_q.clone()
    for _, siblings in groupby(range(1, tree.nodes), key=lambda place: kept[place - 1].parent):
        drawn = [place for place in siblings if kept[place - 1].draw is not None]
        for rows, places in _groups(drawn, kept, trees):
            at = torch.tensor(places, device=root.device)
            q_row[at] = len(q)
            log_q[at] = rows[tree.tokens[at]].log().to(log_q)
            q.append(rows)
    proposal: Proposal = "mixed" if bool((q_row[1:] == CHOSEN).any()) else "sampled"
    return replace(tree, proposal=proposal, q=torch.stack(q), q_row=q_row, log_q=log_q)


def _groups(
    places: Iterable[int], kept: Sequence[MergedNode], trees: Sequence[TokenTree]
) -> Iterable[tuple[Tensor, list[int]]]:
    """Yield every q ``[V]`` of the drawn children of a node, with the children drawn from it."""
    before: list[int] = []

    def source(place: int) -> tuple[int, int]:
        draw = kept[place - 1].draw
        assert draw is not None
        return draw.part, draw.q_row

    for (part, row), group in groupby(places, key=source):
        rows = trees[part].q
        assert rows is not None
        q, members = rows[row], [*group]
        if before:
            q = q.clone()
            q[before] = 0
            q = q / q.sum()
        yield q, members
        before += [kept[place - 1].token for place in members]
