"""What the batched engine knows about a row, and how it shares out the time.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from falcon_lab.decoding.device_clock import DeviceClock
from falcon_lab.decoding.generation import Clock, Generation, Round, Seconds
from falcon_lab.decoding.stopping import Transcript


@dataclass(slots=True)
class Row:
    """A sequence that is being decoded.

    Attributes:
        number: of its prompt.
        prompt: ``[P]`` long.
        transcript: what was written so far.
        generator: the source of its randomness.
        root: 0-d long, the newest token, not yet read by the target.
        rounds: its verifications so far.
        laps: clocks of what it took part in, and its share of each.
    """

    number: int
    prompt: Tensor
    transcript: Transcript
    generator: torch.Generator
    root: Tensor = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    laps: list[tuple[Clock | DeviceClock, float]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether its text is complete."""
        return self.transcript.finish is not None

    def generation(self) -> Generation:
        """The text of a row that has ended."""
        assert self.transcript.finish is not None
        return Generation(
            self.transcript.tokens, self.transcript.finish, self.rounds, self._seconds()
        )

    def _seconds(self) -> Seconds:
        found = Seconds()
        for clock, share in self.laps:
            taken = clock.seconds
            for part in fields(Seconds):
                more = share * getattr(taken, part.name)
                setattr(found, part.name, getattr(found, part.name) + more)
        return found


def share_out(clock: Clock | DeviceClock, rows: Sequence[Row]) -> None:
    """A clock's time is that of these rows, evenly, so that all rows' times add up."""
    for row in rows:
        row.laps.append((clock, 1 / len(rows)))
