"""Drafting for several sequences at once, with any drafter.

A drafter that can do so in one call has ``sequences`` for it. Any other one drafts for each
through copies that share its weights.

Shapes: B rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

from falcon_lab.interfaces import (
    Drafter,
    DraftOutput,
    DraftSequences,
    Frontier,
    Observation,
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

    def reset(self, row: int, first: Tensor) -> None:
        """Start a sequence at that place."""
        drafter = self.drafters[row]
        drafter.reset(first)
        drafter.reserve(self._positions, self._tree)

    def observe(self, row: int, observation: Observation) -> None:
        """Hand it to that place's drafter."""
        self.drafters[row].observe(observation)

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """Make one pass for each sequence."""
        return {row: self.drafters[row].draft(frontier) for row, frontier in frontiers.items()}

    def move(self, source: int, goal: int) -> None:
        """Exchange the two."""
        drafters = self.drafters
        drafters[goal], drafters[source] = drafters[source], drafters[goal]


def sequences_of(drafter: Drafter, rows: int, positions: int, tree: TreeBuilder) -> DraftSequences:
    """Draft for ``rows`` sequences: the drafter itself for one, else its own way or by copies."""
    if rows == 1:
        return OneByOne([drafter], positions, tree)
    own = None if drafter.max_auxiliary else drafter.sequences(rows, positions, tree)
    return OneByOne(copies_of(drafter, rows), positions, tree) if own is None else own


def copies_of(component: T, count: int) -> list[T]:
    """Copies of a drafter, tree builder, rule or controller: each has a state of its own, and all
    have the same weights and the same target."""
    shared = _weights(component)
    return [copy.deepcopy(component, {id(one): one for one in shared}) for _ in range(count)]


def _weights(component: object) -> list[object]:
    """What a component's modules hold, and the target that it was built for."""
    parts: list[Any] = [component, *getattr(component, "__dict__", {}).values()]
    modules = [part for part in parts if isinstance(part, nn.Module)]
    hosts = [part for part in parts if hasattr(part, "embed") and hasattr(part, "head")]
    weights = [[*module.parameters(), *module.buffers()] for module in modules]
    return [*hosts, *chain.from_iterable(weights)]
