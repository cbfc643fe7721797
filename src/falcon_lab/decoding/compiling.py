"""Choose and prepare the compiled passes that ``decoding.compile`` asks for."""

from __future__ import annotations

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.interfaces import Announce, Drafter
from falcon_lab.model.target import Target


def choose_target(target: Target, decoding: DecodingConfig, announce: Announce) -> Target:
    """Return the target as it is, or with compiled passes."""
    return target.compiled(announce) if decoding.compile == "all" else target


def prepare(engine: SpeculativeEngine) -> None:
    """Compile what the engine's rounds need now: it takes long, and would be timed with them."""
    engine.target.prepare(engine.max_nodes)
    engine.drafter.prepare(engine.tree_builder.max_depth + 1)


def choose_drafter(drafter: Drafter, decoding: DecodingConfig, announce: Announce) -> Drafter:
    """Return the drafter as it is, or with compiled passes if it can have them."""
    return drafter if decoding.compile == "none" else drafter.compiled(announce)
