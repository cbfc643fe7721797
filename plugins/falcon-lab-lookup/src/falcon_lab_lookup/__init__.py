"""Drafters without a model for falcon-lab: prompt lookup and Lookahead. Importing this imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import any_seed, ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["LookaheadConfig", "LookupConfig", "register_components"]


@dataclass
class LookupConfig:
    """Configure prompt lookup: what is searched for, and how much is copied."""

    max_ngram: int = ranged(3, least=1, most=1000)
    """Longest run of newest tokens that is searched for earlier in the text."""
    num_tokens: int = ranged(10, least=1, most=1000)
    """Tokens that are copied from behind a match."""
    whole: bool = False
    """Whether a match with fewer tokens after it is no match (the method's first description)."""


@dataclass
class LookaheadConfig:
    """Configure Lookahead decoding (arXiv 2402.02057) with the defaults of its Spec-Bench entry."""

    ngram: int = ranged(5, least=3, most=100)
    """N: tokens of an n-gram, its first token counted."""
    window: int = ranged(7, least=1, most=1000)
    """W: columns of the window, each of which yields an n-gram a round."""
    guesses: int = ranged(7, least=1, most=1000)
    """G: n-grams that are stored for every first token, and verified in a round."""
    from_text: bool = False
    """Whether the n-grams of prompt and answer are stored too."""
    seed: int = any_seed()
    """Seed of the first guesses, which are drawn from the text."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafters."""
    register.drafter("lookup", "falcon_lab_lookup.drafter:LookupDrafter", config=LookupConfig)
    register.drafter(
        "lookahead", "falcon_lab_lookup.lookahead:LookaheadDrafter", config=LookaheadConfig
    )
