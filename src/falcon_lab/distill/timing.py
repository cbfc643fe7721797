"""Where the time of a training step goes."""

from __future__ import annotations

from time import perf_counter

import torch


class StepClock:
    """Seconds of the parts of a step.

    A GPU works on behind the host's back. It is waited for only in steps whose times are wanted,
    and the waiting itself costs such a step a little.
    """

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._since = perf_counter()
        self._device: torch.device | None = None

    def begin(self, device: torch.device, *, wanted: bool) -> None:
        """Start a step: what went before, since ``mark``, was waiting for its data."""
        waited = perf_counter() - self._since
        self._device = device if wanted and device.type == "cuda" else None
        self._parts = {"data": waited}
        self.mark()

    def mark(self) -> None:
        """Whatever comes next begins here."""
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        self._since = perf_counter()

    def lap(self, name: str) -> None:
        """What was done since the last mark or lap belongs to ``name``."""
        before = self._since
        self.mark()
        self._parts[name] = self._parts.get(name, 0.0) + self._since - before

    @property
    def seconds(self) -> dict[str, float]:
        """Part -> seconds of the step that was begun last."""
        return dict(self._parts)
