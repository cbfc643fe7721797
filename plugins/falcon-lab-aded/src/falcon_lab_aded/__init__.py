"""ADED (arXiv 2407.12021): tri-grams of a corpus, searched. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from falcon_lab import hookimpl
from falcon_lab.fields import any_seed, filled, ranged
from falcon_lab.plugins.hooks import Register

__all__ = ["AdedConfig", "register_components"]


@dataclass
class AdedConfig:
    """Configure ADED with the constants of its official code."""

    table: str | None = filled(None, "name a file that falcon_lab_aded has built, or write null")
    """File of tri-grams that ``python -m falcon_lab_aded build`` has written; null begins with
    none, and learns the text's own."""
    iterations: int = ranged(150, least=1, most=10**6)
    """Paths that a search tries."""
    depth: int = ranged(4, least=1, most=100)
    """Tokens of a path."""
    nodes: int = ranged(24, least=1, most=10**6)
    """Nodes that are drafted, those with the most visits."""
    c1: float = ranged(32.0, least=0, most=1e6)
    """How much the search follows the table rather than what it has seen."""
    c2: float = ranged(8.0, above=0, most=1e6)
    """How slowly that grows with the visits: by ln((N + c2 + 1) / c2)."""
    update: float = ranged(0.04, least=0, most=1e3)
    """What a tri-gram of the text gains with every token that finds it among the newest."""
    cap: float = ranged(3.0, above=0, most=1e6)
    """Most that it grows to."""
    window: int = ranged(16, least=3, most=10**6)
    """Newest tokens of which the tri-grams gain."""
    seed: int = any_seed()
    """Seed of the paths that are tried at random."""


@hookimpl
def register_components(register: Register) -> None:
    """Register the drafter."""
    register.drafter("aded", "falcon_lab_aded.drafter:AdedDrafter", config=AdedConfig)
