"""Drafting for several sequences at once, with any drafter.

A drafter that can do so in one call says it by ``sequences`` (``BatchDrafter``). Any other one
drafts row by row, through copies that share its weights.

Shapes: B rows.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from falcon_lab.decoding.observing import most_probes
from falcon_lab.interfaces import (
    Drafter,
    DraftOutput,
    Frontier,
    KeepsRows,
    Observation,
    TreeBuilder,
)

T = TypeVar("T")


class DraftSequences(Protocol):
    """B places for sequences that one drafter drafts for. Every sequence is drafted for as if it
    were alone; the methods are those of ``Drafter``, with a row to say whose call it is."""

    def reset(self, row: int, first: Tensor) -> None:
        """Start a sequence in that row, whatever was there before; ``first`` is a 0-d long."""
        ...

    def observe(self, row: int, observation: Observation) -> None:
        """Take a row's committed positions in and drop what was provisional."""
        ...

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """One pass over the frontiers of some rows; the output of each of them.

        All of them are at the same pass of their rounds. A row that drafts no further is left out
        until its next round.
        """
        ...

    def move(self, source: int, goal: int) -> None:
        """The sequence of row ``source`` goes to row ``goal``, whose own has ended."""
        ...


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A ``Drafter`` that drafts for several sequences in one call."""

    def sequences(self, rows: int, positions: int, tree: TreeBuilder) -> DraftSequences:
        """Places for ``rows`` sequences, apart from the one that the drafter itself has.

        Args:
            rows: B.
            positions: of the longest sequence.
            tree: what is drafted for each. With ``KeepsRows`` the places take ``rows`` times
                ``kv_bytes(positions, tree)``.
        """
        ...


class RowByRow:
    """The ``DraftSequences`` of a drafter that knows one sequence alone.

    Attributes:
        drafters: each row's own.

    Args:
        drafter: what is copied.
        rows: B.
        positions: of the longest sequence.
        tree: what is drafted for each.
    """

    def __init__(self, drafter: Drafter, rows: int, positions: int, tree: TreeBuilder) -> None:
        self.drafters = copies_of(drafter, rows)
        self._positions = positions
        self._tree = tree

    def reset(self, row: int, first: Tensor) -> None:
        """Start a sequence in that row."""
        drafter = self.drafters[row]
        drafter.reset(first)
        if isinstance(drafter, KeepsRows):
            drafter.reserve(self._positions, self._tree)

    def observe(self, row: int, observation: Observation) -> None:
        """Tell that row's copy."""
        self.drafters[row].observe(observation)

    def draft(self, frontiers: Mapping[int, Frontier]) -> dict[int, DraftOutput]:
        """One call for each row."""
        return {row: self.drafters[row].draft(frontier) for row, frontier in frontiers.items()}

    def move(self, source: int, goal: int) -> None:
        """Exchange the two."""
        drafters = self.drafters
        drafters[goal], drafters[source] = drafters[source], drafters[goal]


def sequences_of(drafter: Drafter, rows: int, positions: int, tree: TreeBuilder) -> DraftSequences:
    """The drafter's own way to draft for ``rows`` sequences, or row by row."""
    if isinstance(drafter, BatchDrafter) and not most_probes(drafter):
        return drafter.sequences(rows, positions, tree)
    return RowByRow(drafter, rows, positions, tree)


def asking(sequences: DraftSequences, row: int) -> Drafter | None:
    """Who may have probes for a row: its own drafter, where every row has one."""
    return sequences.drafters[row] if isinstance(sequences, RowByRow) else None


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
