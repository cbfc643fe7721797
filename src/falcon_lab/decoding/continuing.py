"""Verification that goes on where drafting ended: behind the target's first layers.

A drafter that runs these layers over its draft tokens (``Drafter.lower_layers``) leaves their
hidden states, keys and values. Here they are found again for the nodes of the tree, whatever
its order; nodes that were proposed and never read, the leaves, are read through the same layers
in one pass more, and the target runs the other layers over all of them.

Shapes: N tree nodes, U of them unread, P provisional tokens of a round, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Drafter, DraftTokens, LayerPlan, LowerLayers
from falcon_lab.model.masks import send
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.decoding.accepting import Accepted
    from falcon_lab.decoding.target_sequences import TreePasses
    from falcon_lab.model.target import Target, TargetOutput

NO_TOKEN = -1
"""What no node of a tree is: a provisional token that went another way through the layers."""


@dataclass(slots=True)
class ReadTokens:
    """What drafting has read of one sequence in a round, in the order of the KV cache."""

    tokens: list[Tensor] = field(default_factory=list)  # [n] long of each pass
    masks: list[Tensor | None] = field(default_factory=list)  # [n, P + n] bool of each pass
    states: list[Tensor] = field(default_factory=list)  # [n, H] of each pass

    @property
    def count(self) -> int:
        """Return P."""
        return sum(len(part) for part in self.tokens)

    def add(self, drafts: DraftTokens, states: Tensor, *, usable: bool) -> None:
        """Note a pass; of another than the first layers only that it has taken its room."""
        blank = torch.full_like(drafts.tokens, NO_TOKEN)
        self.tokens.append(drafts.tokens if usable else blank)
        self.masks.append(drafts.mask)
        self.states.append(states)

    def slots(self, tree: TokenTree) -> list[int | None]:
        """Return where each node was read: at the same token below the same parent.

        On a GPU the host waits for it here.
        """
        known = self._by_parent()
        found: list[int | None] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            above = found[parent] if parent >= 0 else -1
            # No token is taken twice, should a tree have a node twice.
            found.append(None if above is None else known.pop((above, token), None))
        return found

    def _by_parent(self) -> dict[tuple[int, int], int]:
        """Return the slot of every token by its parent's, which is its newest ancestor."""
        known: dict[tuple[int, int], int] = {}
        slot = 0
        for tokens, mask in zip(self.tokens, self.masks, strict=True):
            rows = [None] * len(tokens) if mask is None else mask.tolist()
            for token, row in zip(tokens.tolist(), rows, strict=True):
                seen = range(slot) if row is None else (at for at in range(slot) if row[at])
                known[max(seen, default=-1), token] = slot
                slot += 1
        return known


class ContinuedPasses:
    """The target's passes over the sequences in use, verification behind the lower layers.

    Args:
        target: the model.
        passes: its own.
        drafter: which runs the first layers.

    Raises:
        FalconLabError: the target has no such layers, or the drafter has auxiliary nodes, too.
    """

    def __init__(self, target: Target, passes: TreePasses, drafter: Drafter) -> None:
        self._layers = drafter.lower_layers
        self._plan = LayerPlan(last=self._layers)
        LayerPlan(first=self._layers).check(target.config.num_hidden_layers)
        if drafter.max_auxiliary:
            raise FalconLabError(
                f"{type(drafter).__name__} runs the target's first {self._layers} layers for "
                "verification, and has auxiliary nodes, which none of its passes reads; it must "
                "leave one of lower_layers and max_auxiliary at 0"
            )
        self._inner = passes
        self._read: dict[int, ReadTokens] = {}  # of the round, by place

    def commit(self, accepted: Sequence[Accepted]) -> None:
        """Commit the accepted path of every tree."""
        self._inner.commit(accepted)

    def layers_run(self, place: int) -> float:
        """Return the layers of the round's passes."""
        return self._inner.layers_run(place)

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append provisional tokens, and note what the lower layers give of them."""
        found = self._inner.run(drafts, plan)
        for place, new in drafts.items():
            # Several tokens without a mask attend to later ones too, as none does in a tree.
            usable = plan == self._plan and (new.mask is not None or len(new.tokens) == 1)
            self._read.setdefault(place, ReadTokens()).add(new, found[place], usable=usable)
        return found

    def verify(
        self, trees: Sequence[TokenTree], lower: LowerLayers | None = None
    ) -> list[TargetOutput]:
        """Read what is unread of the trees, and run the other layers over all nodes."""
        if self._read and lower is None:
            slots = self._complete(trees)
            states = [
                torch.cat(self._read[place].states).index_select(0, send(order, tree.tokens.device))
                for place, (tree, order) in enumerate(zip(trees, slots, strict=True))
            ]
            lower = LowerLayers(self._layers, states, slots)
        self._read = {}
        return self._inner.verify(trees, lower)

    def _complete(self, trees: Sequence[TokenTree]) -> list[list[int]]:
        """Run the lower layers over nodes that they have not read; return the slots of all."""
        found, missing = [], {}
        for place, tree in enumerate(trees):
            read = self._read.setdefault(place, ReadTokens())
            slots, count = read.slots(tree), read.count
            unread = [node for node, slot in enumerate(slots) if slot is None]
            later = iter(range(count, count + len(unread)))
            order = [next(later) if slot is None else slot for slot in slots]
            if unread:
                missing[place] = _drafts(tree, unread, order, count)
            found.append(order)
        if missing:
            self.run(missing, self._plan)
        return found


def _drafts(tree: TokenTree, unread: list[int], order: list[int], count: int) -> DraftTokens:
    """Return nodes as provisional tokens behind ``count`` earlier ones.

    Args:
        tree: whose nodes they are.
        unread: which, ``[U]``.
        order: slot of every node.
        count: P.
    """
    device = tree.tokens.device
    nodes = send(unread, device)
    mask = torch.zeros(len(unread), count + len(unread), dtype=torch.bool, device=device)
    mask[:, send(order, device)] = tree.ancestors.index_select(0, nodes)
    return DraftTokens(tree.tokens[nodes], tree.depth[nodes], mask)
