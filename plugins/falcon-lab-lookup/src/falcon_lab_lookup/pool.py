"""The n-grams that Lookahead has seen.

Shapes: N tokens of an n-gram, G n-grams of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

Gram = tuple[int, ...]
"""The N - 1 tokens behind an n-gram's first."""


class Pool:
    """The G n-grams of every first token that were seen last.

    Args:
        most: G.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.grams: dict[int, dict[Gram, None]] = {}  # oldest first

    def add(self, first: int, gram: Sequence[int]) -> None:
        """Keep an n-gram as the newest of its first token."""
        kept, gram = self.grams.setdefault(first, {}), tuple(gram)
        kept.pop(gram, None)
        kept[gram] = None
        if len(kept) > self._most:
            del kept[next(iter(kept))]

    def behind(self, first: int) -> list[Gram]:
        """The n-grams of a token, newest first."""
        return [*reversed(self.grams.get(first, {}))]
