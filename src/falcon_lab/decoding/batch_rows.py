"""What the batched engine knows about a row, and how it shares out the time.

Shapes: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from falcon_lab.decoding.generation import Clock, Generation, Part, Round, Seconds
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
        seconds: its share of the time.
    """

    number: int
    prompt: Tensor
    transcript: Transcript
    generator: torch.Generator
    root: Tensor = field(init=False)
    rounds: list[Round] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def ended(self) -> bool:
        """Whether its text is complete."""
        return self.transcript.finish is not None

    def generation(self) -> Generation:
        """The text of a row that has ended."""
        assert self.transcript.finish is not None
        return Generation(self.transcript.tokens, self.transcript.finish, self.rounds, self.seconds)


class SharedClock(Clock):
    """Shares every lap out evenly among the rows that it was for, so that times add up."""

    def lap_of(self, part: Part, rows: Sequence[Row]) -> None:
        """The time since the last lap went into ``part`` of these rows."""
        self.seconds = Seconds()
        self.lap(part)
        taken = getattr(self.seconds, part) / max(1, len(rows))
        for row in rows:
            setattr(row.seconds, part, getattr(row.seconds, part) + taken)
            if part != "prefill":
                row.seconds.total += taken

    def skip(self) -> None:
        """The time since the last lap was not decoding's."""
        self._last = self._now()
