"""Drafters without a model: what is said follows from the node, or from how often one was asked.

Shapes: F frontier blocks, k block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from falcon_lab.interfaces import Drafter, DraftOutput, Frontier, Observation, RoundContext
from falcon_lab.tree import TokenTree

Tokens = tuple[int, ...]
"""The draft tokens from the root to a node."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is said at every node.

    Attributes:
        vocabulary: V.
        block: k.
        seed: of what it says.
        silent: share of the tokens that it does not propose.
        rows: rows of a block that it speaks about, at most k.
        finds: it has whole paths too (``DraftOutput.paths``).
    """

    vocabulary: int
    block: int
    seed: int = 0
    silent: float = 0.0
    rows: int | None = None
    finds: bool = False

    def paths(self) -> list[list[int]] | None:
        """Whole paths below the root, some of which begin alike."""
        if not self.finds:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        count = int(torch.randint(0, 6, (1,), generator=generator))
        tokens = torch.randint(0, self.vocabulary, (count, 7), generator=generator)
        tokens[:, 0] %= 3
        return [row[: 1 + number].tolist() for number, row in enumerate(tokens, start=1)]

    def output(self, stands: Sequence[Tokens]) -> DraftOutput:
        """A pass over blocks at these nodes."""
        return DraftOutput(torch.stack([self.logits(at) for at in stands]), paths=self.paths())

    def logits(self, stand: Tokens) -> Tensor:
        """``[rows, V]`` of the block at a node."""
        place = 0
        for token in stand:
            place = place * (self.vocabulary + 1) + token + 1
        generator = torch.Generator().manual_seed(10_007 * self.seed + place)
        rows = self.block if self.rows is None else self.rows
        logits = 2 * torch.randn(rows, self.vocabulary, generator=generator)
        hidden = torch.rand(rows, self.vocabulary, generator=generator) < self.silent
        return logits.masked_fill(hidden, -torch.inf)


@dataclass(slots=True)
class Grown:
    """A round.

    Attributes:
        context: that it began with.
        asked: for every pass, the nodes at which its blocks stood.
        tree: that came out of it; None when the builder was misled.
        problem: what was wrong with a frontier; empty when nothing was.
    """

    context: RoundContext
    asked: list[list[Tokens]] = field(default_factory=list)
    tree: TokenTree | None = None
    problem: str = ""


def grow(builder: Any, source: Standing, context: RoundContext, passes: int = 99) -> Grown:
    """A round of a tree builder; it is broken off after so many passes, as a controller does."""
    done = Grown(context)
    frontier = builder.start(context)
    while frontier is not None and len(done.asked) < passes:
        done.problem = _problem(frontier, done.asked, source.block)
        if done.problem:
            return done
        stands = _stands(frontier, done.asked)
        done.asked.append(stands)
        frontier = builder.grow(source.output(stands))
    done.tree = builder.finish()
    return done


def _problem(frontier: Frontier, asked: list[list[Tokens]], block: int) -> str:
    """What is wrong with a frontier."""
    tokens, parents = list(frontier.tokens.shape), frontier.parents.tolist()
    if not asked:
        right = tokens == [1, 0] and parents == [-1]
        return "" if right else f"first tokens {tokens} and parents {parents}, not [1, 0] and [-1]"
    if not parents:
        return f"no blocks in pass {len(asked) + 1}, not None"
    if tokens != [len(parents), block]:
        return f"tokens {tokens} in pass {len(asked) + 1}, not [F, k] = {[len(parents), block]}"
    if not all(0 <= parent < len(asked[-1]) for parent in parents):
        blocks = len(asked[-1])
        return f"parents {parents} in pass {len(asked) + 1}, after a pass of {blocks} blocks"
    return ""


def _stands(frontier: Frontier, asked: list[list[Tokens]]) -> list[Tokens]:
    if not asked:
        return [()]
    pairs = zip(frontier.tokens.tolist(), frontier.parents.tolist(), strict=True)
    return [(*asked[-1][parent], *tokens) for tokens, parent in pairs]


class Wandering(Drafter):
    """A drafter whose logits follow from how often it was asked.

    Args:
        vocabulary: V.
        block: k.
        finds: it has whole paths too.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, vocabulary: int, block: int, *, finds: bool = False) -> None:
        self.block = block
        self._finds = finds
        self._vocabulary = vocabulary
        self._asked = 0

    def reset(self, first: Tensor) -> None:
        """Begin to count."""
        self._asked = 0

    def observe(self, observation: Observation) -> None:
        """Learns nothing."""

    def draft(self, frontier: Frontier) -> DraftOutput:
        """``[F, k, V]`` random logits, of which a third is not proposed."""
        self._asked += 1
        source = Standing(self._vocabulary, self.block, self._asked, silent=0.3, finds=self._finds)
        return source.output([(number,) for number in range(frontier.tokens.shape[0])])
