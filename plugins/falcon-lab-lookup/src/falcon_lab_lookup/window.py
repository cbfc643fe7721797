"""Lookahead's window: Jacobi iterations of several columns side by side.

Level 0 is a guess of the text to come, one token a position. Column i continues guess i - 1
(the newest token itself for i = 0) with its tokens of level 1, of level 2, up to N - 2. So the
window is a tree, level 0 a chain below the root and each column a branch off it, and the target's
choice behind a column's end is new. The chosen tokens become the last level; the others move up
one: level 0 is forgotten, and level 1 without its first takes its place, one position further on.
(It moves by one however many tokens the round accepted, as in the official code by default,
there ``ALWAYS_FWD_ONE``.)

To begin with there is level 0 alone, longer by what moving on will take from it, and every round
adds a level.

Shapes: N tokens of an n-gram, W columns, P tokens of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from falcon_lab_lookup.pool import Gram


def sizes(ngram: int, window: int, levels: int) -> tuple[int, ...]:
    """Return the tokens of every level while there are so many of them."""
    moved = levels - 1
    first = window + ngram - 3 - moved
    return (first, *(first + 1 for _ in range(moved)))


def most_tokens(ngram: int, window: int) -> int:
    """Return the largest P."""
    return max(sum(sizes(ngram, window, levels)) for levels in range(1, ngram))


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the depths and the attention mask of a window.

    Attributes:
        depth: ``[P]`` long, positions behind the root.
        mask: ``[P, P]`` bool, which of its tokens each one attends to.
        deepest: the greatest depth.
    """

    depth: Tensor
    mask: Tensor
    deepest: int

    @classmethod
    def of(cls, counts: Sequence[int]) -> Shape:
        """Make the shape of levels of these sizes."""
        number = {
            (level, place): index
            for index, (level, place) in enumerate(
                (level, place) for level, count in enumerate(counts) for place in range(count)
            )
        }
        depth: list[int] = []
        mask = torch.eye(len(number), dtype=torch.bool)
        for (level, place), index in number.items():
            above = (level - 1, place) if level > 1 else (0, place - 1)
            parent = number.get(above)
            if parent is not None:
                mask[index] |= mask[parent]
            depth.append(1 if parent is None else depth[parent] + 1)
        return cls(torch.tensor(depth, dtype=torch.long), mask, max(depth, default=0))


class Window:
    """Iterate a window.

    Args:
        ngram: N.
        window: W.
        guess: tokens of level 0, W + N - 3 of them.
    """

    def __init__(self, ngram: int, window: int, guess: Iterable[int]) -> None:
        self._full = ngram - 1
        self.levels = [list(guess)]
        assert len(self.levels[0]) == window + ngram - 3

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of tokens of every level."""
        return tuple(map(len, self.levels))

    @property
    def tokens(self) -> list[int]:
        """Return all tokens, level by level."""
        return [*chain.from_iterable(self.levels)]

    def advance(self, root: int, new: Sequence[int]) -> list[tuple[int, Gram]]:
        """Take in the target's choices behind the tokens of the last level.

        Args:
            root: the newest token when the target read the window.
            new: as many tokens as the last level has.

        Returns:
            The n-gram of every column, as its first token and the others; none before the window
            has all its levels.
        """
        if len(self.levels) < self._full:
            # Every level moves one position on, as the text does; the new one is there already
            # if it follows level 0, as the target predicts what comes after each token.
            behind = list(new) if len(self.levels) == 1 else list(new)[1:]
            self.levels = [*(level[1:] for level in self.levels), behind]
            return []
        firsts = [root, *self.levels[0]]
        found = [
            (first, (*column, last))
            for first, *column, last in zip(firsts, *self.levels[1:], new, strict=True)
        ]
        self.levels = [self.levels[1][1:], *self.levels[2:], list(new)]
        return found
