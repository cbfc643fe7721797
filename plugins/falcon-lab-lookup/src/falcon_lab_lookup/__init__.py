"""Prompt lookup decoding for falcon-lab. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.hookspecs import Register

__all__ = ["LookupConfig", "register_components"]


@dataclass
class LookupConfig:
    """What is looked for, and how much is copied."""

    max_ngram: int = 3
    """Longest run of newest tokens that is looked for earlier in the text."""
    num_tokens: int = 10
    """Tokens that are copied from behind a match."""

    def __post_init__(self) -> None:
        for key in ("max_ngram", "num_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, got {getattr(self, key)}")


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter."""
    register.drafter("lookup", "falcon_lab_lookup.drafter:LookupDrafter", config=LookupConfig)
