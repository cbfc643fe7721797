"""The n-grams that Lookahead has collected.

Shapes: N tokens of an n-gram, G n-grams of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

Gram = tuple[int, ...]
"""The N - 1 tokens behind an n-gram's first."""


class Pool:
    """Hold the G newest n-grams of every first token.

    Args:
        most: G.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.grams: dict[int, dict[Gram, None]] = {}  # oldest first

    def add(self, first: int, gram: Sequence[int]) -> None:
        """Add an n-gram as the newest of its first token."""
        known, gram = self.grams.setdefault(first, {}), tuple(gram)
        known.pop(gram, None)
        known[gram] = None
        if len(known) > self._most:
            del known[next(iter(known))]

    def behind(self, first: int) -> list[Gram]:
        """Return the n-grams of a token, newest first."""
        return [*reversed(self.grams.get(first, {}))]
