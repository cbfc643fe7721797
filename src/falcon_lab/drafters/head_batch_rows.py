"""What batched drafting knows of its rows between calls.

Shapes: L committed rows of a sequence, F frontier blocks, P provisional blocks, Q blocks that may
be seen, k block, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from falcon_lab.drafters.fusing import State
from falcon_lab.drafters.head_decoding import Decoding
from falcon_lab.protocols import Observation
from falcon_lab.targets.batch_cache import RowCache


@dataclass
class Prompt:
    """A sequence that has not been drafted for yet.

    Attributes:
        cache: its row.
        decoding: takes it in.
    """

    cache: RowCache
    decoding: Decoding


@dataclass
class Known:
    """What the host knows of a row.

    Attributes:
        prompt: until its first pass.
        length: L.
        pending: positions that the next round computes.
        provisional: P.
    """

    prompt: Prompt | None = None
    length: int = 0
    pending: list[Observation] = field(default_factory=list)
    provisional: int = 0


@dataclass(frozen=True, slots=True)
class BatchPass:
    """What the next pass continues from; the blocks of all rows stand one after the other.

    Attributes:
        first: row -> its first block.
        features: ``[ΣF, k, H]`` predicted features.
        state: LSTM state after each block's last row.
        visible: ``[ΣF, Q]`` bool, the provisional blocks of its row that each block sees.
        depth: passes since the root.
    """

    first: dict[int, int]
    features: Tensor
    state: State | None
    visible: Tensor
    depth: int
