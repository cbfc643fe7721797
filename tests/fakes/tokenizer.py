"""A tokenizer that is a list of strings."""

from __future__ import annotations

from collections.abc import Sequence


class Pieces:
    """Token i spells ``pieces[i]``; byte strings may split characters."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def decode(self, tokens: Sequence[int], **_: bool) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")
