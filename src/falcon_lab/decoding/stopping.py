"""Decide where a text ends.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

from torch import Tensor

from falcon_lab.errors import FalconLabError

Finish = Literal["eos", "stop", "length", "context"]
"""Why a text ended: end-of-sequence token, stop string, ``max_new_tokens``, or the target's longest
context."""


class StopCondition:
    """End-of-sequence tokens and stop strings.

    Args:
        eos_ids: tokens that end the text.
        strings: strings that end the text.
        tokenizer: what stop strings are looked up with; not needed without them.

    Raises:
        FalconLabError: a stop string is empty, or there is no tokenizer to find it with.
    """

    def __init__(
        self, eos_ids: Collection[int] = (), strings: Sequence[str] = (), tokenizer: Any = None
    ) -> None:
        if strings and tokenizer is None:
            raise FalconLabError("stop strings need a tokenizer, and the target has none")
        if "" in strings:
            raise FalconLabError("a stop string is empty; it would end every text at once")
        self.eos_ids = frozenset(eos_ids)
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        # A token spells at least one byte, so a stop string ends within as many of them. The few
        # more give tokenizers that depend on a token's neighbours the neighbours they need.
        self._window = max((len(text.encode()) for text in self.strings), default=0) + 8

    def reason(self, tokens: list[int]) -> Finish | None:
        """Return why a text ends with the last of ``tokens`` (it did not end before), or None."""
        if tokens[-1] in self.eos_ids:
            return "eos"
        if self.strings:
            tail = self._decode(tokens[-self._window :])
            if any(text in tail for text in self.strings):
                return "stop"
        return None

    def text(self, tokens: list[int]) -> str:
        """Return what stands before the end-of-sequence token and the first stop string."""
        text = self._decode([token for token in tokens if token not in self.eos_ids])
        places = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(places, default=len(text))]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class Transcript:
    """The text so far. It ends where plain decoding would end it, whatever is added at once.

    Args:
        stop: what ends the text.
        limit: most tokens.
        at_limit: the reason when the limit is reached.
    """

    def __init__(self, stop: StopCondition, limit: int, at_limit: Finish) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._stop = stop
        self._limit = limit
        self._at_limit = at_limit

    @property
    def remaining(self) -> int:
        """Tokens that may still be added."""
        return self._limit - len(self.tokens)

    def extend(self, tokens: list[int]) -> list[int]:
        """Add tokens until the text ends; return those that were added."""
        for added, token in enumerate(tokens):
            if self.finish is not None:
                return tokens[:added]
            self.tokens.append(token)
            self.finish = self._stop.reason(self.tokens)
            if self.finish is None and self.remaining == 0:
                self.finish = self._at_limit
        return tokens


def begin(
    prompt: Tensor | Sequence[int], max_new_tokens: int, max_positions: int, stop: StopCondition
) -> Transcript:
    """Return the empty transcript of a prompt's continuation; the prompt is ``[P]`` long.

    Prompt and continuation together are at most ``max_positions`` tokens.

    Raises:
        FalconLabError: the prompt is empty or leaves no room, or no token is requested.
    """
    if len(prompt) == 0:
        raise FalconLabError(
            "the prompt is empty; a target needs one token to continue (its begin-of-sequence "
            "token, for instance)"
        )
    if max_new_tokens < 1:
        raise FalconLabError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    room = max_positions - len(prompt)
    if room < 1:
        raise FalconLabError(
            f"the prompt has {len(prompt)} tokens and the target reads at most {max_positions}; "
            "shorten the prompt"
        )
    if room < max_new_tokens:
        return Transcript(stop, room, "context")
    return Transcript(stop, max_new_tokens, "length")
