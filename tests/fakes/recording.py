"""Recorders for machines without a GPU. None of them lets a pass wait for the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fakes.waits import watched
from falcon_lab.testing import compiling as testing

Outputs = tuple[Tensor, ...]


class Repeating(testing.Repeating):
    """The public one, which also sees that a pass does not wait."""

    def capture(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        with watched() as seen:
            replay = super().capture(run)
        assert seen == []
        return replay


class Refusing:
    """Captures a few times, and then never again."""

    def __init__(self, after: int = 0) -> None:
        self.left = after
        self.tried = 0

    def capture(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        self.tried += 1
        outputs = run()
        if self.left == 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        self.left -= 1
        del outputs
        return run
