"""Draft trees for the requests of a server that verifies them itself.

The server owns the target, its KV cache, sampling and acceptance. It gives the features of every
position that it computes, and asks for a tree whenever a request is decoded; which nodes were
accepted is seen in the text that it then has. Trees have a fixed number of nodes, as servers want.

Shapes: T positions, H hidden, N nodes of a tree, the root among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from falcon_lab.drafters.sequences import copies_of, sequences_of
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Budget, Drafter, Frontier, Observation, RoundContext, TreeBuilder
from falcon_lab.sampling import Sampling

if TYPE_CHECKING:
    from falcon_lab.tree import TokenTree

ROOT = -1
"""Parent of the root."""
FILLING = 0
"""The token of nodes that fill a tree up."""


class DraftedTree(NamedTuple):
    """A tree of exactly N nodes.

    Attributes:
        tokens: of its nodes; the first is the newest token of the text.
        parents: node -> its parent, which comes before it; -1 for the root.
    """

    tokens: list[int]
    parents: list[int]

    def path(self, tokens: Sequence[int]) -> list[int] | None:
        """Return the nodes from the root along these tokens; None where they leave the tree."""
        known = {
            (p, t): node for node, (p, t) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path = [0]
        for token in tokens:
            node = known.get((path[-1], token))
            if node is None:
                return None
            path.append(node)
        return path

    def ancestors(self) -> list[list[bool]]:
        """Return N rows of N: whether the second node is the first or an ancestor of it."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            row = [False] * len(self.tokens) if parent == ROOT else list(rows[parent])
            row[node] = True
            rows.append(row)
        return rows


@dataclass
class Request:
    """What is known of a request.

    Attributes:
        place: of its sequence among those that are drafted for.
        observed: positions that its drafter has taken in.
        waiting: features of the positions after them, in their order.
        tree: that is being verified, and what the server computed at its nodes.
        length: of the text when that was drafted.
        whole: no position's features are missing.
    """

    place: int
    observed: int = 0
    waiting: list[Tensor] = field(default_factory=list)
    tree: DraftedTree | None = None
    nodes: Tensor | None = None
    length: int = 0
    whole: bool = True

    @property
    def known(self) -> int:
        """Return the positions whose features were seen."""
        return self.observed + sum(len(rows) for rows in self.waiting)

    def read(self, start: int, features: Tensor) -> None:
        """Take in features of positions from ``start`` on, ``[T, H]``."""
        if start == self.known:
            self.waiting.append(features)
        else:
            self.whole = False

    def follow(self, text: Sequence[int]) -> None:
        """Take in what was accepted of the last tree, as the text now shows."""
        tree, rows = self.tree, self.nodes
        self.tree = self.nodes = None
        if tree is None or rows is None:
            return
        path = tree.path(text[self.length : -1])
        if path is None:
            self.whole = False
        else:
            self.waiting.append(rows[torch.tensor(path, device=rows.device)])


class ServedDrafter:
    """One drafter for all requests of a server.

    Args:
        drafter: whose weights are shared by all sequences.
        tree: what is drafted for each.
        nodes: N, of every tree.
        places: requests at the same time.
        positions: of the longest text.
        device: of the features.

    Raises:
        FalconLabError: the drafter or the tree needs what a server does not give.
    """

    def __init__(
        self,
        drafter: Drafter,
        tree: TreeBuilder,
        *,
        nodes: int,
        places: int,
        positions: int,
        device: torch.device,
    ) -> None:
        check_servable(drafter, tree, nodes)
        self._drafter, self._device = drafter, device
        self._sequences = sequences_of(drafter, places, positions, tree)
        self._builders = copies_of(tree, places)
        self._nodes = nodes
        self._free = list(range(places))
        self._requests: dict[str, Request] = {}  # least recently used first
        self._generator = torch.Generator(device).manual_seed(0)

    def read(self, name: str, start: int, features: Tensor) -> None:
        """Take in what the server computed of a request's prompt.

        Args:
            name: of the request.
            start: the first position; 0 begins the request anew.
            features: ``[T, H]``, of the positions from there on.
        """
        if start == 0 or name not in self._requests:
            self.leave(name)
            self._requests[name] = Request(self._place())
        self._requests[name].read(start, features)

    def knows(self, name: str) -> bool:
        """Whether a request has a place."""
        return name in self._requests

    def known(self, name: str) -> int:
        """Return the positions of a request whose features were seen; -1 where it has no place."""
        return self._requests[name].known if name in self._requests else -1

    def leave(self, name: str) -> None:
        """Forget a request; nothing happens where it is not known."""
        if (request := self._requests.pop(name, None)) is not None:
            self._free.append(request.place)

    def clear(self) -> None:
        """Forget all requests."""
        for name in list(self._requests):
            self.leave(name)

    @torch.no_grad()
    def draft(self, texts: Mapping[str, Sequence[int]]) -> list[DraftedTree]:
        """Return a tree for every request that is decoded, in their order.

        Args:
            texts: request -> all tokens that it has.
        """
        frontiers: dict[int, Frontier] = {}
        for name, text in texts.items():
            if (request := self._ready(name, text)) is None:
                continue
            self._requests[name] = self._requests.pop(name)
            root = torch.tensor(text[-1], device=self._device)
            context = RoundContext(root, Budget(), Sampling(), self._generator)
            if (frontier := self._builders[request.place].start(context)) is not None:
                frontiers[request.place] = frontier
        drafting = set(frontiers)
        while frontiers:
            outputs, frontiers = self._sequences.draft(frontiers), {}
            for place, output in outputs.items():
                if (further := self._builders[place].grow(output)) is not None:
                    frontiers[place] = further
        return [self._tree(name, text, drafting) for name, text in texts.items()]

    def verified(self, name: str, features: Tensor) -> None:
        """Take in the features at the nodes of a request's last tree, ``[N, H]``."""
        if name in self._requests:
            self._requests[name].nodes = features

    def _ready(self, name: str, text: Sequence[int]) -> Request | None:
        """Let a request's drafter observe what is new; None where it cannot draft."""
        request = self._requests.get(name)
        if request is None:
            return None
        request.follow(text)
        request.whole = request.whole and request.known == len(text) - 1
        if not request.whole:
            return None
        if request.observed == 0:
            self._sequences.reset(request.place, torch.tensor(text[0], device=self._device))
            self._builders[request.place].reset()
        if request.waiting:
            tokens = torch.tensor(text[request.observed + 1 :], device=self._device)
            rows = torch.cat(request.waiting) if "features" in self._drafter.needs else None
            self._sequences.observe(request.place, Observation(tokens, rows))
            request.observed, request.waiting = len(text) - 1, []
        return request

    def _tree(self, name: str, text: Sequence[int], drafting: set[int]) -> DraftedTree:
        request = self._requests.get(name)
        if request is None or request.place not in drafting:
            tree = filled([text[-1]], [ROOT], self._nodes)
        else:
            tree = as_lists(self._builders[request.place].finish(), self._nodes)
        if request is not None:
            request.tree, request.length = tree, len(text)
        return tree

    def _place(self) -> int:
        """Return a free place; the request that was not decoded for longest makes room."""
        if not self._free:
            self.leave(next(iter(self._requests)))
        return self._free.pop()


def check_servable(drafter: Drafter, tree: TreeBuilder, nodes: int) -> None:
    """See that a server gives all that drafting needs.

    Raises:
        FalconLabError: naming what it does not give.
    """
    kind = type(drafter).__name__
    if drafter.taps:
        raise FalconLabError(
            f"{kind} reads the layers {list(drafter.taps)}, and features alone are served; such "
            "heads have formats of their own (falcon-lab export)"
        )
    if drafter.lower_layers or drafter.max_auxiliary or drafter.provisional(tree):
        raise FalconLabError(f"{kind} drafts by passes of the target, which a server does not lend")
    if drafter.drafters:
        raise FalconLabError(f"{kind} is made of several drafters; serve one of them")
    if tree.max_nodes > nodes:
        raise FalconLabError(
            f"the tree has up to {tree.max_nodes} nodes, the root among them, and the server "
            f"verifies {nodes}; draft fewer, or let it verify more"
        )


def as_lists(tree: TokenTree, nodes: int) -> DraftedTree:
    """Return a tree of exactly so many nodes."""
    return filled(tree.tokens.tolist(), tree.parents.tolist(), nodes)


def filled(tokens: list[int], parents: list[int], nodes: int) -> DraftedTree:
    """Return a tree that is filled up by a chain below its last node.

    That node has no children, so that no two siblings are of one token: a rule that samples would
    count it twice.
    """
    for _ in range(nodes - len(tokens)):
        parents = [*parents, len(tokens) - 1]
        tokens = [*tokens, FILLING]
    return DraftedTree(tokens, parents)
