"""Assemble engines: from components or their nodes, with the passes that ``decoding.compile`` asks
for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from falcon_lab.config.schema import DecodingConfig
from falcon_lab.decoding.engine import SpeculativeEngine
from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import Announce, BuildContext, Drafter
from falcon_lab.model.target import Target
from falcon_lab.plugins.registry import Components

KINDS = {
    "tree": "tree_builder",
    "acceptance": "acceptance_rule",
    "controller": "controller",
}
"""Key of the configuration -> kind of component."""


def assemble(
    target: Target,
    drafter: Drafter,
    parts: Mapping[str, Any],
    components: Components,
    *,
    decoding: DecodingConfig | None = None,
) -> SpeculativeEngine:
    """Make the engine of a drafter; several engines may share one.

    Args:
        target: verifies.
        drafter: the object.
        parts: ``tree``, ``acceptance`` and ``controller``: objects, or the nodes that describe
            them.
        components: build the nodes.
        decoding: how the engine runs; None: the defaults.

    Raises:
        FalconLabError: a part cannot be built, or a drafter of several has one tree alone.
    """
    context = BuildContext.of(target, drafter)
    made = [components.provide(kind, parts[key], context) for key, kind in KINDS.items()]
    if drafter.drafters and not made[0].builders:
        raise FalconLabError(
            f"a drafter of {len(drafter.drafters)} parts has a tree for each of them; give it "
            "tree: {name: union, parts: […]}"
        )
    return SpeculativeEngine(target, drafter, *made, decoding=decoding)


def choose_target(target: Target, decoding: DecodingConfig, announce: Announce) -> Target:
    """Return the target as it is, or with compiled passes."""
    return target.compiled(announce) if decoding.compile == "all" else target


def choose_drafter(drafter: Drafter, decoding: DecodingConfig, announce: Announce) -> Drafter:
    """Return the drafter as it is, or with compiled passes if it can have them."""
    return drafter if decoding.compile == "none" else drafter.compiled(announce)


def prepare(engine: SpeculativeEngine) -> None:
    """Compile what the engine's rounds need now: it is slow, and would be timed with them."""
    engine.target.prepare(engine.max_nodes)
    engine.drafter.prepare(engine.tree_builder.max_depth + 1)
