"""Drafters without a model for falcon-lab: prompt lookup and Lookahead. Importing this imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.plugins.hooks import Register

__all__ = ["LookaheadConfig", "LookupConfig", "register_components"]


def _at_least(config: object, **least: int) -> None:
    for key, value in least.items():
        if getattr(config, key) < value:
            raise ValueError(f"{key} must be at least {value}, got {getattr(config, key)}")


@dataclass
class LookupConfig:
    """What is looked for, and how much is copied."""

    max_ngram: int = 3
    """Longest run of newest tokens that is looked for earlier in the text."""
    num_tokens: int = 10
    """Tokens that are copied from behind a match."""
    whole: bool = False
    """Whether a match with fewer tokens after it is no match (the method's first description)."""

    def __post_init__(self) -> None:
        _at_least(self, max_ngram=1, num_tokens=1)


@dataclass
class LookaheadConfig:
    """Lookahead decoding (arXiv 2402.02057); the defaults are those of its Spec-Bench entry."""

    ngram: int = 5
    """N: tokens of an n-gram, the one that it is found by counted."""
    window: int = 7
    """W: columns of the window, each of which gives an n-gram a round."""
    guesses: int = 7
    """G: n-grams that are kept of every first token, and verified in a round."""
    from_text: bool = False
    """Whether the n-grams of prompt and answer are kept too."""
    seed: int = 0
    """Of the first guesses, which are tokens of the text."""

    def __post_init__(self) -> None:
        _at_least(self, ngram=3, window=1, guesses=1)


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafters."""
    register.drafter("lookup", "falcon_lab_lookup.drafter:LookupDrafter", config=LookupConfig)
    register.drafter(
        "lookahead", "falcon_lab_lookup.lookahead:LookaheadDrafter", config=LookaheadConfig
    )
