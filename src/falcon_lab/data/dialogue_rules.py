"""What no dialogue may be: looping, broken, or a prompt of an evaluation.

Shapes: n tokens or words of an n-gram.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from falcon_lab.decoding.stopping import Finish, StopCondition

LOOP_WINDOW, LOOP_NGRAM, LOOP_LEAST, LOOP_DISTINCT = 128, 4, 16, 0.5
LOOP_RULE = (
    f"a text loops where less than {LOOP_DISTINCT:.0%} of the {LOOP_NGRAM}-grams of its last "
    f"{LOOP_WINDOW} tokens are distinct, of at least {LOOP_LEAST}"
)
UNREADABLE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character."""
EVERY = 32
"""Tokens after which a text that is being written is looked at again."""

OVERLAP = 13
"""Words that a dialogue may not share in a row with a prompt of an evaluation."""
SHORTEST = 5
"""Words of a prompt that may not be held; one that is shorter may not be a whole message."""
OVERLAP_RULE = (
    f"a message that holds {OVERLAP} words in a row of a prompt (all of one that is shorter, and "
    f"below {SHORTEST} where the message is no more than that), case and punctuation aside"
)


def is_looping(tokens: Sequence[int]) -> bool:
    """Return whether a text loops at its end (``LOOP_RULE``)."""
    tail = tokens[-LOOP_WINDOW:]
    grams = [tuple(tail[i : i + LOOP_NGRAM]) for i in range(len(tail) - LOOP_NGRAM + 1)]
    return len(grams) >= LOOP_LEAST and len(set(grams)) < LOOP_DISTINCT * len(grams)


class EndOrLoop(StopCondition):
    """Ends a text that loops too, so that no time is lost on it."""

    def reason(self, tokens: list[int]) -> Finish | None:
        """Return why a text ends with the last of ``tokens``; a loop is a ``stop``."""
        found = super().reason(tokens)
        if found is None and len(tokens) % EVERY == 0 and is_looping(tokens):
            return "stop"
        return found


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.casefold())


@dataclass(frozen=True)
class Hit:
    """What a dialogue shares with an evaluation.

    Attributes:
        source: name of the set.
        words: the words.
    """

    source: str
    words: str


@dataclass
class KeptOut:
    """Prompts of evaluations, none of which a dialogue may hold (``OVERLAP_RULE``).

    Attributes:
        sets: name -> how many texts.
    """

    sets: dict[str, int] = field(default_factory=dict)
    _held: dict[int, dict[tuple[str, ...], str]] = field(default_factory=dict)
    _whole: dict[tuple[str, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, sets: Mapping[str, Iterable[str]]) -> KeptOut:
        """Keep out the texts of sets by name."""
        kept = cls()
        for name, texts in sets.items():
            kept.sets[name] = 0
            for text in texts:
                kept._add(name, text)
        return kept

    def _add(self, name: str, text: str) -> None:
        found = words(text)
        self.sets[name] += 1
        size = min(len(found), OVERLAP)
        if size < SHORTEST:
            self._whole.setdefault(tuple(found), name)
            return
        held = self._held.setdefault(size, {})
        for start in range(len(found) - size + 1):
            held.setdefault(tuple(found[start : start + size]), name)

    def hit(self, text: str) -> Hit | None:
        """Return what a message shares with a set, or None."""
        found = tuple(words(text))
        if found and found in self._whole:
            return Hit(self._whole[found], " ".join(found))
        for size, held in self._held.items():
            for start in range(len(found) - size + 1):
                gram = found[start : start + size]
                if gram in held:
                    return Hit(held[gram], " ".join(gram))
        return None

    @property
    def facts(self) -> list[str]:
        """Return all that is looked for, in an order of its own."""
        grams = [*self._whole, *(gram for held in self._held.values() for gram in held)]
        return sorted(" ".join(gram) for gram in grams)


def fault_of(text: str, tokens: Sequence[int], special: Collection[int]) -> str | None:
    """Return why a text cannot be part of a dialogue, in a word of the card; None: it can.

    Args:
        text: what was written, decoded.
        tokens: the same as tokens, without the end.
        special: tokens that no text may hold.
    """
    if not words(text):
        return "empty"
    if UNREADABLE in text or any(token in special for token in tokens):
        return "broken"
    return "looping" if is_looping(tokens) else None
