"""What ``decoding.compile`` asks for."""

from __future__ import annotations

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.interfaces import Announce, Compilable, Drafter, is_trainable
from falcon_lab.model.target import Target


def choose_target(target: Target, decoding: DecodingConfig, announce: Announce) -> Target:
    """The target as it is, or with compiled passes."""
    return target.compiled(announce) if decoding.compile == "all" else target


def prepare(engine: SpeculativeEngine) -> None:
    """Compile what the engine's rounds need now: it takes long, and would be timed with them."""
    engine.target.prepare(engine.max_nodes)
    if isinstance(engine.drafter, Compilable):
        engine.drafter.prepare(engine.tree_builder.max_depth + 1)


def choose_drafter(drafter: Drafter, decoding: DecodingConfig, announce: Announce) -> Drafter:
    """The drafter as it is, or with compiled passes if it can have them.

    One that has weights and cannot says so.
    """
    if decoding.compile == "none":
        return drafter
    if isinstance(drafter, Compilable):
        return drafter.compiled(announce)
    if is_trainable(drafter):
        announce(f"{type(drafter).__name__} is not compiled: it has no passes that could be")
    return drafter


def is_compiled(drafter: Drafter) -> bool:
    """Whether a drafter has compiled passes."""
    return isinstance(drafter, Compilable) and drafter.is_compiled
