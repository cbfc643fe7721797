"""A drafter whose logits follow from the node, and its trees path by path.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import Budget, DraftOutput, Frontier, RoundContext
from falcon_lab.sampling import Sampling
from falcon_lab.tree import TokenTree, ancestor_matrix

Tokens = tuple[int, ...]
"""The draft tokens from the root to a node."""

ROOT = 7


class NodeDrafter:
    """Gives the same logits whenever a block is expanded at the same node.

    Args:
        vocab: V.
        block: k.
        seed: of its logits.
        silent: share of the tokens that it does not propose.
        rows: tokens of a block that have logits.
    """

    def __init__(
        self, vocab: int, block: int, *, seed: int = 0, silent: float = 0.0, rows: int | None = None
    ) -> None:
        self.vocab = vocab
        self.block = block
        self.rows = block if rows is None else rows
        self.seed = seed
        self.silent = silent
        self.asked: list[list[Tokens]] = []

    def logits(self, stand: Tokens) -> Tensor:
        place = 0
        for token in stand:
            place = place * (self.vocab + 1) + token + 1
        generator = torch.Generator().manual_seed(10_007 * self.seed + place)
        logits = 2 * torch.randn(self.rows, self.vocab, generator=generator)
        hidden = torch.rand(self.rows, self.vocab, generator=generator) < self.silent
        return logits.masked_fill(hidden, -torch.inf)

    def grow(
        self, builder: Any, budget: Budget | None = None, passes: int = 99, **sampling: Any
    ) -> TokenTree:
        """A round; ``asked`` is then where the blocks of every pass stood."""
        generator = torch.Generator()
        context = RoundContext(
            torch.tensor(ROOT), budget or Budget(), Sampling(**sampling), generator
        )
        frontier, self.asked = builder.start(context), []
        while frontier is not None and len(self.asked) < passes:
            stands = self.stands(frontier)
            self.asked.append(stands)
            frontier = builder.grow(DraftOutput(torch.stack([self.logits(at) for at in stands])))
        return builder.finish()

    def stands(self, frontier: Frontier) -> list[Tokens]:
        if not self.asked:
            assert frontier.tokens.shape == (1, 0)
            assert frontier.parents.tolist() == [-1]
            return [()]
        assert frontier.tokens.shape == (len(frontier.parents), self.block)
        before = self.asked[-1]
        return [
            (*before[parent], *tokens)
            for tokens, parent in zip(
                frontier.tokens.tolist(), frontier.parents.tolist(), strict=True
            )
        ]

    def grid(self, stand: Tokens, levels: int, width: int | None = None) -> dict[Tokens, float]:
        """Every path of a block's grid, by its log-probability below the block's node."""
        rows = self.logits(stand).double().log_softmax(-1)[:levels]
        rows = rows.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        best = [row.argsort(descending=True)[:width].tolist() for row in rows]
        return {
            (*stand, *tokens): score
            for length in range(1, len(best) + 1)
            for tokens in product(*best[:length])
            if (score := sum(float(rows[i, token]) for i, token in enumerate(tokens))) > -math.inf
        }

    def reachable(self, depth: int) -> dict[Tokens, float]:
        """Every path of up to ``depth`` tokens, with every node expanded, by log-probability."""
        found: dict[Tokens, float] = {}
        stands: dict[Tokens, float] = {(): 0.0}
        for start in range(0, depth, self.block):
            below = {
                path: stands[at] + score
                for at in stands
                for path, score in self.grid(at, depth - start).items()
            }
            found |= below
            stands = {path: at for path, at in below.items() if len(path) == start + self.block}
        return found


def best(scores: dict[Tokens, float], nodes: int) -> set[Tokens]:
    """The paths of the ``nodes`` highest scores."""
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[:nodes])


def spelt(tree: TokenTree) -> list[Tokens]:
    """The path of every node but the root, in the tree's order."""
    paths: list[Tokens] = [()]
    for token, parent in zip(tree.tokens.tolist()[1:], tree.parents.tolist()[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def check_tree(tree: TokenTree) -> None:
    """What holds for every tree: parents come first, siblings differ and the best comes first."""
    paths = [(), *spelt(tree)]
    assert tree.proposal == "deterministic"
    assert tree.tokens[0] == ROOT
    assert tree.parents[0] == -1
    assert tree.log_q[0] == 0
    assert bool((tree.log_q <= 0).all())
    assert len(set(paths)) == len(paths), "two siblings have one token"
    assert all(parent < node for node, parent in enumerate(tree.parents.tolist()))
    assert tree.depth.tolist() == [len(path) for path in paths]
    assert torch.equal(tree.ancestors, ancestor_matrix(tree.parents))
    for parent in range(tree.nodes):
        siblings = tree.log_q[tree.parents == parent].tolist()
        assert siblings == sorted(siblings, reverse=True)
