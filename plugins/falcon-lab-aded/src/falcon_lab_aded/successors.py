"""What may follow two tokens, and how a text changes it.

A context is two tokens in one number, a·V + b. Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Successors(NamedTuple):
    """The tokens that may follow a context.

    Attributes:
        tokens: each of them once.
        scores: how likely each is; they need not add up to 1.
        sums: of the scores up to each one.
    """

    tokens: Sequence[int]
    scores: Sequence[float]
    sums: Sequence[float]

    @classmethod
    def of(cls, tokens: Sequence[int], scores: Sequence[float]) -> Successors:
        """Add the sums."""
        return cls(tokens, scores, [*accumulate(scores)])


NONE = Successors((), (), ())
"""Those of a context that was never seen."""

Known = Callable[[int], Successors]
"""Context -> what may follow it."""


def nothing(context: int) -> Successors:
    """Return what a table without tri-grams knows."""
    return NONE


class Adaptive:
    """The successors of a shared table, as the text of one sequence has changed them.

    Every token that is committed finds the tri-grams of the ``window`` newest tokens, itself the
    last of them, and adds ``update`` to each one's score, up to ``cap``. So a tri-gram gains
    ``window - 2`` times in all, and what is known depends on the text alone, however it came.

    Args:
        known: the table.
        vocabulary: V.
        update: what is added.
        cap: most that a score becomes; one that was greater stays.
        window: tokens.
    """

    def __init__(
        self, known: Known, vocabulary: int, *, update: float, cap: float, window: int
    ) -> None:
        self._known, self._vocabulary = known, vocabulary
        self._update, self._cap, self._gains = update, cap, window - 2
        self._text: list[int] = []
        self._gained: dict[int, dict[int, int]] = {}  # context -> successor -> times

    @property
    def text(self) -> Sequence[int]:
        """The tokens that were committed."""
        return self._text

    def extend(self, tokens: Iterable[int]) -> None:
        """Commit tokens."""
        before = len(self._text)
        self._text += tokens
        if not self._update:
            return
        text, now = self._text, len(self._text)
        for at in range(max(2, before - self._gains + 1), now):
            # The tri-gram that ends at ``at`` gains at lengths at + 1 to at + gains.
            times = min(now, at + self._gains) - max(before, at)
            of_context = self._gained.setdefault(text[at - 2] * self._vocabulary + text[at - 1], {})
            of_context[text[at]] = of_context.get(text[at], 0) + times

    def successors(self, context: int) -> Successors:
        """Return what may follow a context, that of the table first."""
        found, gained = self._known(context), self._gained.get(context)
        if gained is None:
            return found
        update, cap = self._update, self._cap
        scores = dict(zip(found.tokens, found.scores, strict=True))
        for token, times in gained.items():
            score = scores.get(token, 0.0)
            scores[token] = max(score, min(score + update * times, cap))
        return Successors.of([*scores], [*scores.values()])
