"""What ``decoding.compile`` asks for."""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable

from falcon_lab.compiling.ahead import Announce
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.protocols import Drafter
from falcon_lab.schema import DecodingConfig
from falcon_lab.targets.target import Target


@runtime_checkable
class Compilable(Protocol):
    """A drafter that can compile its passes."""

    def compiled(self, announce: Announce) -> Self:
        """The same drafter with the same weights, drafting through compiled passes."""
        ...

    def prepare(self, longest: int) -> None:
        """Compile what rounds need that add up to so many tokens, before they are timed."""
        ...


def choose_target(target: Target, decoding: DecodingConfig, announce: Announce) -> Target:
    """The target as it is, or with compiled passes."""
    return target.compiled(announce) if decoding.compile == "all" else target


def prepare(engine: SpeculativeEngine) -> None:
    """Compile what the engine's rounds need now: it takes long, and would be timed with them."""
    engine.target.prepare(engine.max_nodes)
    if isinstance(engine.drafter, Compilable):
        engine.drafter.prepare(engine.tree_builder.max_depth + 1)


def choose_drafter(drafter: Drafter, decoding: DecodingConfig, announce: Announce) -> Drafter:
    """The drafter as it is, or with compiled passes if it can have them."""
    if decoding.compile == "none" or not isinstance(drafter, Compilable):
        return drafter
    return drafter.compiled(announce)
