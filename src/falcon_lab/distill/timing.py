"""Where the time of a training step goes."""

from __future__ import annotations

import torch

from falcon_lab.timing import Stopwatch


class StepClock:
    """Seconds of the parts of a step.

    A GPU works on behind the host's back. It is waited for only in steps whose times are wanted,
    and the waiting itself costs such a step a little.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._watch = Stopwatch()

    def begin(self, device: torch.device, *, wanted: bool) -> None:
        """Start a step: what went before, since ``mark``, was waiting for its data."""
        self._watch.device = None
        self._parts = {"data": self._watch.lap()}
        self._watch.device = device if wanted else None
        self.mark()

    def mark(self) -> None:
        """Whatever comes next begins here."""
        self._watch.start()

    def lap(self, name: str) -> None:
        """What was done since the last mark or lap belongs to ``name``."""
        self._parts[name] = self._parts.get(name, 0.0) + self._watch.lap()

    @property
    def seconds(self) -> dict[str, float]:
        """Part -> seconds of the step that was begun last."""
        return dict(self._parts)
