"""Several sequences that one drafter drafts for: in its own way, or by copies of it.

Copies share its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

from falcon_lab.interfaces import (
    Drafter,
    DraftOutput,
    DraftSequences,
    DraftTokens,
    Frontier,
    LayerPlan,
    Observation,
    RoundContext,
    TargetLayers,
    TreeBuilder,
)

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
        self._layers: TargetLayers | None = None

    def attach(self, layers: TargetLayers) -> None:
        """Give every drafter the target's layers over its own place."""
        self._layers = layers
        for place in range(len(self.drafters)):
            self._attach(place)

    def _attach(self, place: int) -> None:
        if self._layers is not None:
            self.drafters[place].attach(OnePlace(self._layers, place))

    def reset(self, place: int, first: Tensor) -> None:
        """Start a sequence at that place."""
        drafter = self.drafters[place]
        drafter.reset(first)
        drafter.reserve(self._positions, self._tree)

    def begin_round(self, place: int, context: RoundContext) -> None:
        """Tell the drafter of ``place`` what its round may spend."""
        self.drafters[place].begin_round(context)

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
        for place in (goal, source):
            self._attach(place)


class OnePlace:
    """The target's layers over one of several sequences, which is in place 0 here.

    Args:
        layers: over all of them.
        place: which one.
    """

    def __init__(self, layers: TargetLayers, place: int) -> None:
        self._layers, self._place = layers, place

    def run(self, drafts: Mapping[int, DraftTokens], plan: LayerPlan) -> dict[int, Tensor]:
        """Append tokens to the sequence."""
        return {0: self._layers.run({self._place: drafts[0]}, plan)[self._place]}


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
    parts: list[Any] = [*_with_attributes(component)]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    hosts = [part for part in parts if hasattr(part, "embed") and hasattr(part, "head")]
    weights = [[*module.parameters(), *module.buffers()] for module in modules]
    return [*hosts, *chain.from_iterable(weights)]


def _with_attributes(component: object) -> Iterator[object]:
    """Yield a component, its attributes, and likewise the drafters that it is made of."""
    yield from (component, *getattr(component, "__dict__", {}).values())
    for part in getattr(component, "drafters", ()):
        yield from _with_attributes(part)
