"""Documents one behind another in lanes, for a recurrence that starts anew with each of them.

A recurrence takes its steps one by one and its sequences side by side. One sequence a document
pads all of them to the longest: three times the rows, where documents are of all lengths. In lanes
as long as the longest document nearly every row belongs to one.

Shapes: B sequences, T rows of one, D documents, N lanes, L rows of a lane, C channels.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from falcon_lab.drafters.relaxed_mask import Runs


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the rows of a packed batch lie.

    Between two documents of a lane there is a row of neither.

    Attributes:
        place: ``[B, T]`` long, ``n·L + l`` of each row.
        count: N.
        length: L.
    """

    place: Tensor
    count: int
    length: int

    @classmethod
    def of(cls, runs: Runs) -> Self:
        """As few lanes as a greedy search finds, as long as the longest document."""
        sizes = torch.bincount(runs.number.flatten(), minlength=runs.count).tolist()
        starts, count = lay(sizes, runs.longest)
        begin = torch.tensor(starts, device=runs.number.device)
        return cls(begin[runs.number] + runs.offset, count, runs.longest)

    def spread(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, T, C]`` -> ``[N, L, C]``, and ``[N, L]`` bool: the places of no document."""
        flat = self.place.flatten()
        spread = rows.new_zeros(self.count * self.length, rows.shape[-1])
        spread = spread.index_copy(0, flat, rows.flatten(0, 1))
        free = torch.ones(spread.shape[0], dtype=torch.bool, device=rows.device)
        free[flat] = False
        return spread.unflatten(0, (self.count, -1)), free.view(self.count, self.length)

    def gather(self, spread: Tensor) -> Tensor:
        """``[N, L, C]`` -> ``[B, T, C]``: the inverse of ``spread``."""
        rows = spread.flatten(0, 1).index_select(0, self.place.flatten())
        return rows.unflatten(0, self.place.shape)


def lay(sizes: Sequence[int], length: int) -> tuple[list[int], int]:
    """Best fit, the largest first: where each document starts, and how many lanes there are.

    Args:
        sizes: rows of each document.
        length: of a lane, at least the largest size.

    Returns:
        ``n·length + l`` for each document, and N.
    """
    starts, count = [0] * len(sizes), 0
    room: list[tuple[int, int]] = []  # (free rows at the end, lane), sorted
    for number in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        size = sizes[number]
        found = bisect_left(room, (size + 1, -1))  # a row of no document comes first
        if found < len(room):
            free, lane = room.pop(found)
            free -= 1
        else:
            free, lane, count = length, count, count + 1
        starts[number] = lane * length + length - free
        insort(room, (free - size, lane))
    return starts, count
