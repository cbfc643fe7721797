"""Drafting in the pass that verifies: further positions behind every node say what follows.

Shapes: C tree nodes, k block, P = C·k positions behind them, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from falcon_lab.interfaces import (
    Acceptance,
    Drafter,
    DraftOutput,
    Frontier,
    Observation,
    TreeBuilder,
)
from falcon_lab.model.masks import earlier_of_the_same
from falcon_lab.tree import AuxiliaryNodes, Entrance, TokenTree

MOST = 1024
"""Positions behind the nodes of a round; a larger tree is verified without, and nothing is drafted
next."""


class PositionsBehind(Drafter):
    """Has the target read k positions behind every node, which guess what follows it.

    Of these it reads as many as the trees are deep: later ones would guess what is not drafted.

    Position j behind a node guesses the token j + 1 steps below it: the next one the node guesses
    itself. Those behind the last accepted node are the next round's draft; the first round of a
    text drafts nothing, as a prompt is read without them.

    Attributes:
        block: k.
        needs: no features.
        max_passes: one; all k guesses are there when a round begins.
    """

    needs: frozenset[str] = frozenset()
    max_passes = 1
    max_auxiliary = MOST
    vocab_size: int
    """V, of the target."""
    _guesses: Tensor | None = None  # [k, V] after the newest token
    _deepest: int | None = None  # of the trees; None: not known

    @abstractmethod
    def read_behind(self, nodes: int, most: int) -> tuple[Tensor, Entrance | None]:
        """Return what the target reads behind every node.

        Args:
            nodes: C.
            most: positions behind each.

        Returns:
            Tokens ``[C · most]`` long, and where they enter, if that is not the embedding.
        """

    def reset(self, first: Tensor) -> None:
        """Forget the sequence."""
        self._guesses = None

    def reserve(self, positions: int, tree: TreeBuilder) -> None:
        """Remember how deep the trees are."""
        self._deepest = tree.max_depth

    def observe(self, observation: Observation) -> None:
        """Do nothing: what is known comes from the positions behind nodes."""

    @torch.no_grad()
    def draft(self, frontier: Frontier) -> DraftOutput:
        """Return the guesses of the latest pass for the root, and nothing below it."""
        if frontier.tokens.shape[1] or self._guesses is None:
            return DraftOutput.nothing(frontier, self.vocab_size)
        return DraftOutput(self._guesses[None], all_proposed=True)

    def most_auxiliary(self, tree: TreeBuilder) -> int:
        """Return as many for every node of the largest tree, as far as ``MOST`` goes."""
        return min(self.max_auxiliary, tree.max_nodes * min(self.block, tree.max_depth))

    def auxiliary_nodes(self, tree: TokenTree, max_depth: int) -> AuxiliaryNodes | None:
        """Return positions for every node, as far as the text can still grow."""
        self._guesses = None
        wanted = self.block if self._deepest is None else min(self.block, self._deepest)
        most = min(wanted, max_depth - tree.max_depth)
        if most < 1 or tree.nodes * most > self.max_auxiliary:
            return None
        step = torch.arange(1, most + 1, device=tree.tokens.device)
        node = torch.arange(tree.nodes, device=tree.tokens.device).repeat_interleave(most)
        tokens, entrance = self.read_behind(tree.nodes, most)
        return AuxiliaryNodes(
            tokens.to(node.device),
            (tree.depth[:, None] + step).flatten(),
            torch.cat((tree.ancestors[node], earlier_of_the_same(node)), 1),
            entrance,
        )

    def observe_auxiliary(self, tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> None:
        """Keep what the positions behind the newest committed token guess."""
        count = tree.parents.shape[0]
        guesses = logits[count:].view(count, -1, logits.shape[-1])
        self._guesses = guesses.index_select(0, acceptance.path[-1:])[0].clone()
