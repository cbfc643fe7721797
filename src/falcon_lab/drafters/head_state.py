"""The state of a head's drafting between passes: of every sequence, and of a round's branches.

Shapes: R sequences, L committed tokens of a sequence, F blocks of a pass, P cached blocks of a
round, k block, C channels of a fused token, M LSTM layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from falcon_lab.drafters.fusing import State
from falcon_lab.interfaces import Observation


@dataclass(slots=True)
class Drafted:
    """A sequence that is drafted for.

    Attributes:
        pending: positions that the next round computes.
        length: L, the tokens that are fused.
        computed: of them, those whose keys and values are in the cache.
        blocks: P, behind them.
        state: of the fuse after the last of them, ``[M, 1, H]`` each.
        recent: ``[1, n, C]``, the newest of them, fused: k, or as many as are not computed.
    """

    pending: list[Observation] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    blocks: int = 0
    state: State | None = None
    recent: Tensor | None = None

    def window(self, start: int, stop: int) -> Tensor:
        """Return the fused tokens from ``start`` to ``stop``, ``[n, C]``."""
        if self.recent is None:
            return torch.empty(0, 0)
        before = self.length - self.recent.shape[1]
        return self.recent[0, start - before : stop - before]

    def append(self, fused: Tensor, state: State | None) -> None:
        """Take ``[1, n, C]`` fused tokens in, and the state after them."""
        self.recent = fused if self.recent is None else torch.cat([self.recent, fused], dim=1)
        self.state = state
        self.length += fused.shape[1]

    def complete(self, block: int) -> None:
        """Note that a round's first pass has computed everything."""
        assert self.recent is not None
        self.recent, self.computed, self.blocks = self.recent[:, -block:], self.length, 0

    def newest(self, block: int) -> Tensor:
        """Return the newest k fused tokens, ``[1, k, C]``, padded with zeros in front."""
        assert self.recent is not None
        missing = block - self.recent.shape[1]
        return functional.pad(self.recent, (0, 0, missing, 0)) if missing else self.recent


@dataclass(frozen=True, slots=True)
class Pass:
    """What the next pass continues from; the blocks of all sequences stand one after the other.

    Attributes:
        first: sequence -> its first block.
        features: ``[ΣF, k, H]``, predicted.
        state: of the fuse after each block's last token.
        visible: ``[ΣF, P]`` bool, the cached blocks on the way to each block, itself too; None:
            all of them.
        depth: passes since the root.
    """

    first: dict[int, int]
    features: Tensor
    state: State | None
    visible: Tensor | None
    depth: int


def branch(state: State | None, parents: Tensor) -> State | None:
    """Return the states of some of the sequences."""
    return None if state is None else (state[0][:, parents], state[1][:, parents])


def split_state(state: State | None, count: int) -> list[State | None]:
    """Return the state of each sequence."""
    if state is None:
        return [None] * count
    return list(zip(state[0].split(1, dim=1), state[1].split(1, dim=1), strict=True))


def joined_state(states: Sequence[State | None]) -> State | None:
    """Return the states of some sequences as one, ``[M, R, H]`` each, in one piece of memory."""
    found = [state for state in states if state is not None]
    if not found:
        return None
    if len(found) == 1:
        return found[0][0].contiguous(), found[0][1].contiguous()
    return torch.cat([h for h, _ in found], dim=1), torch.cat([c for _, c in found], dim=1)
