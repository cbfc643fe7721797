"""Recorders for machines without a GPU. None of them lets a pass wait for the device."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fakes.waits import watched

Outputs = tuple[Tensor, ...]


class Repeating:
    """Runs again what it was given, and fills the same outputs, as a graph does.

    Attributes:
        captures: how many there were.
        replays: of all of them together.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        self.captures += 1
        with watched() as seen:
            outputs = tuple(output.clone() for output in run())
        assert seen == []

        def replay() -> Outputs:
            self.replays += 1
            for place, new in zip(outputs, run(), strict=True):
                place.copy_(new)
            return outputs

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
