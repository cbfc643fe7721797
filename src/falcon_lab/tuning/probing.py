"""Where the drafter had the target's own tokens among its candidates.

A round's look goes along the target's text, pass by pass, each block being given the true tokens
and the drafter's own predicted features, as a tree's branches are. The ranks of the true tokens on
the way are all that a static tree's acceptance depends on: it accepts the longest beginning of
them that it holds. No wide tree need be verified, and no rank is missed.

Shapes: F frontier blocks, k block, V vocabulary, W width.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falcon_lab.protocols import Drafter, Frontier
from falcon_lab.trees.paths import Path
from falcon_lab.tuning.texts import Reader, Text

WIDTH = 64
"""Candidates of a row that are looked at."""


@dataclass(frozen=True)
class Look:
    """One round.

    Attributes:
        ranks: of the true tokens, from the root on, as long as they are among the candidates and
            add to the text. A tree that holds the first n of them emits n + 1 tokens.
        known: true tokens that there were to be found; fewer than asked for at a text's end.
        confidence: the drafter's log-probability of its own likeliest path after each pass.
        limit: longest path that the round may draft.
    """

    ranks: Path
    known: int
    confidence: tuple[float, ...]
    limit: int

    def passes(self, block: int, most: int, log_threshold: float) -> int:
        """Passes that a round makes under the ``confidence`` controller (``-inf``: ``fixed``)."""
        made = 1
        while made < most and made * block < self.limit:
            sure = self.confidence[made - 1] if made <= len(self.confidence) else -math.inf
            if sure < log_threshold:
                break
            made += 1
        return made


@dataclass(frozen=True)
class Follow:
    """Which tree a walk through a text follows.

    Attributes:
        paths: the tree's.
        log_threshold: of the ``confidence`` controller; ``-inf`` is ``fixed``.
    """

    paths: Collection[Path]
    log_threshold: float = -math.inf

    def accepted(self, look: Look, block: int) -> int:
        """Draft tokens that a round accepts and that add to the text."""
        height = max(map(len, self.paths), default=0)
        passes = look.passes(block, -(-height // block), self.log_threshold)
        deepest = min(look.limit, passes * block, len(look.ranks))
        count = 0
        while count < deepest and look.ranks[: count + 1] in self.paths:
            count += 1
        return count


@torch.inference_mode()
def walk(
    text: Text, drafter: Drafter, follow: Follow, *, depth: int, lowest: float, skip: int = 0
) -> list[Look]:
    """Look at every round that decoding with a tree has, and go on as it would.

    Args:
        text: what is decoded.
        drafter: with block k.
        follow: the tree, and when to stop drafting.
        depth: longest path that is looked at.
        lowest: log-confidence below which no threshold lies: no need to look further.
        skip: answer tokens that count as the prompt's: other rounds of the same text.
    """
    reader, looks = Reader(text, drafter, skip), []
    follow = Follow(frozenset(follow.paths), follow.log_threshold)
    while reader.room:
        looks.append(look(reader, depth, lowest))
        reader.advance(follow.accepted(looks[-1], drafter.block) + 1)
    return looks


def look(reader: Reader, depth: int, lowest: float) -> Look:
    """What the drafter would propose from here on. The last true token adds nothing as a draft."""
    drafter, block = reader.drafter, reader.drafter.block
    truth = reader.truth(min(depth, reader.room - 1))
    frontier: Frontier | None = Frontier.root(reader.root.device)
    ranks: list[int] = []
    confidence: list[float] = []
    pathfinder = _Pathfinder(block)
    while frontier is not None:
        logits = drafter.draft(frontier).logits
        before = confidence[-1] if confidence else 0.0
        confidence.append(before + _sureness(logits[0]))
        wanted = truth[len(ranks) :][:block] if len(ranks) == pathfinder.depth else []
        ranks += _ranks(logits[-1], wanted)
        pathfinder.depth += block
        alive = len(ranks) == pathfinder.depth < len(truth)
        own = confidence[-1] >= lowest and logits.shape[1] == block
        more = pathfinder.depth < depth and pathfinder.depth < reader.limit
        frontier = pathfinder.next(logits, truth, alive, own) if more else None
    return Look(tuple(ranks), len(truth), tuple(confidence), reader.limit)


class _Pathfinder:
    """Frontiers of one block or two: the drafter's own likeliest path, and the true one.

    While they are the same it is one block. The own path comes first, as in a tree.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.depth = 0
        self._one = True  # whether both are the same so far
        self._asked = (True, True)

    def next(self, logits: Tensor, truth: Sequence[int], alive: bool, own: bool) -> Frontier | None:
        """The next pass of the paths that still matter, ``[F, k]`` tokens."""
        true_tokens = truth[self.depth - self.block : self.depth]
        own_tokens: list[int] = logits[0].argmax(-1).tolist() if own else []
        parent = 0 if self._one or not self._asked[0] else 1
        self._one = self._one and alive and own and own_tokens == true_tokens
        blocks = [(own_tokens, 0)] if own and self._asked[0] else []
        if alive and not self._one:
            blocks.append((list(true_tokens), parent))
        self._asked = (own and self._asked[0], alive)
        if not blocks:
            return None
        tokens, parents = zip(*blocks, strict=True)
        device = logits.device
        return Frontier(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))


def _sureness(logits: Tensor) -> float:
    """Log-probability of the first candidates of a block, ``[rows, V]``."""
    return float(logits.float().log_softmax(-1).amax(-1).sum()) if logits.shape[0] else -math.inf


def _ranks(logits: Tensor, truth: Sequence[int]) -> list[int]:
    """Ranks of the true tokens in ``[rows, V]``, up to the first that is not proposed."""
    if not truth:
        return []
    scores, tokens = logits.float().topk(min(WIDTH, logits.shape[-1]), dim=-1)
    found: list[int] = []
    for token, row, score in zip(truth, tokens.tolist(), scores.tolist(), strict=False):
        if token not in row or score[row.index(token)] == -math.inf:
            break
        found.append(row.index(token))
    return found
