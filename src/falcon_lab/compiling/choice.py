"""What ``decoding.compile`` asks for."""

from __future__ import annotations

from typing import Protocol, Self, runtime_checkable

from falcon_lab.compiling.ahead import Announce
from falcon_lab.protocols import Drafter
from falcon_lab.schema import DecodingConfig
from falcon_lab.targets.target import Target


@runtime_checkable
class Compilable(Protocol):
    """A drafter that can compile its passes."""

    def compiled(self, announce: Announce) -> Self:
        """The same drafter with the same weights, drafting through compiled passes."""
        ...


def choose_target(target: Target, decoding: DecodingConfig, announce: Announce) -> Target:
    """The target as it is, or with compiled passes."""
    return target.compiled(announce) if decoding.compile == "all" else target


def choose_drafter(drafter: Drafter, decoding: DecodingConfig, announce: Announce) -> Drafter:
    """The drafter as it is, or with compiled passes if it can have them."""
    if decoding.compile == "none" or not isinstance(drafter, Compilable):
        return drafter
    return drafter.compiled(announce)
