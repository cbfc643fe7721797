"""The drafter's side of decoding: its sequences, what it observes, and its auxiliary nodes.

A drafter that can draft for several sequences in one call has ``sequences`` for it. Any other one
drafts for each through copies that share its weights.

Shapes: M committed positions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import (
    Drafter,
    DraftOutput,
    DraftSequences,
    Frontier,
    Observation,
    TreeBuilder,
)
from falcon_lab.tree import TokenTree

if TYPE_CHECKING:
    from falcon_lab.model.target import TargetOutput

T = TypeVar("T")


class OneByOne:
    """The ``DraftSequences`` of drafters that know one sequence each.

    Attributes:
        drafters: each place's own.

    Args:
        drafters: one for every place.
        positions: of the longest sequence.
        tree: what is drafted for each.
    """

    def __init__(self, drafters: list[Drafter], positions: int, tree: TreeBuilder) -> None:
        self.drafters = drafters
        self._positions = positions
        self._tree = tree

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence at that place."""
        drafter = self.drafters[place]
        drafter.reset(first)
        drafter.reserve(self._positions, self._tree)

    def observe(self, place: int, observation: Observation) -> None:
        """Give an observation to the drafter of ``place``."""
        self.drafters[place].observe(observation)

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Make one pass for each sequence."""
        return {place: self.drafters[place].draft(one) for place, one in frontiers.items()}

    def move(self, source: int, goal: int) -> None:
        """Exchange the drafters of two places."""
        drafters = self.drafters
        drafters[goal], drafters[source] = drafters[source], drafters[goal]


def sequences_of(drafter: Drafter, count: int, positions: int, tree: TreeBuilder) -> DraftSequences:
    """Draft for ``count`` sequences: the drafter itself for one, else its own way or by copies."""
    if count == 1:
        return OneByOne([drafter], positions, tree)
    own = None if drafter.max_auxiliary else drafter.sequences(count, positions, tree)
    return OneByOne(copies_of(drafter, count), positions, tree) if own is None else own


def copies_of(component: T, count: int) -> list[T]:
    """Copy a drafter, tree builder, rule or controller.

    Each copy has a state of its own, and all have the same weights and the same target.
    """
    shared = _weights(component)
    return [copy.deepcopy(component, {id(one): one for one in shared}) for _ in range(count)]


def _weights(component: object) -> list[object]:
    """List what a component's modules hold, and the target that it was built for."""
    parts: list[Any] = [component, *getattr(component, "__dict__", {}).values()]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    hosts = [part for part in parts if hasattr(part, "embed") and hasattr(part, "head")]
    weights = [[*module.parameters(), *module.buffers()] for module in modules]
    return [*hosts, *chain.from_iterable(weights)]


def observation(
    drafter: Drafter,
    tokens: Tensor,
    output: TargetOutput,
    path: Tensor | None = None,
    *,
    remaining: int = 0,
) -> Observation:
    """Return the observation of positions, with what the drafter needs of them and no more.

    Args:
        drafter: whose needs hold.
        tokens: ``[M]`` long, what follows each position.
        output: the target's pass over them.
        path: ``[M]`` long, which of the tokens read they are; None: all of them.
        remaining: positions still to come before the drafter's turn.
    """
    features = output.features if "features" in drafter.needs else None
    parts = [
        states if states is None or path is None else states.index_select(0, path)
        for states in (features, output.taps)
    ]
    return Observation(tokens, parts[0], remaining, parts[1])


def with_auxiliary(drafter: Drafter, tree: TokenTree, max_depth: int) -> TokenTree:
    """Return a round's tree with the auxiliary nodes of its drafter, if it has any.

    Raises:
        FalconLabError: there are more of them than there is room for in the cache.
    """
    if not drafter.max_auxiliary:
        return tree
    added = drafter.auxiliary_nodes(tree, max_depth)
    if added is None:
        return tree
    if len(added.tokens) > drafter.max_auxiliary:
        raise FalconLabError(
            f"{type(drafter).__name__} has {len(added.tokens)} auxiliary nodes in a round and "
            f"max_auxiliary {drafter.max_auxiliary}; its max_auxiliary must be the most that there "
            "can be"
        )
    return tree.with_auxiliary(added)
