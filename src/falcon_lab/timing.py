"""Time work fairly: one stopwatch that waits for the device, and one rotation of turns.

A GPU works on behind the host's back, so a clock that does not wait for it times the launches
alone. A machine is disturbed now and then, so what is compared takes turns, in an order that
rotates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def synchronize(device: torch.device | None) -> None:
    """Wait until a GPU has done all that it was given; return at once for any other device."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


class Stopwatch:
    """Measures wall and CPU seconds, as a context manager or lap by lap.

        with Stopwatch(device) as watch:
            work()
        print(watch.wall)

    Args:
        device: is waited for at every reading; None measures the host alone.

    Attributes:
        wall: seconds between the last two readings.
        cpu: seconds that the processor worked for this process meanwhile, all threads together; a
            busy machine disturbs them less.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.wall = self.cpu = 0.0
        self.start()

    def start(self) -> None:
        """Begin a lap."""
        synchronize(self.device)
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def lap(self) -> float:
        """End a lap, begin the next one, and return the wall seconds of the one that ended."""
        wall, cpu = self._wall, self._cpu
        self.start()
        self.wall, self.cpu = self._wall - wall, self._cpu - cpu
        return self.wall

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.lap()


def rotated(items: Sequence[T], by: int) -> list[T]:
    """Return the items in their order, beginning with number ``by`` (counted round)."""
    first = by % len(items) if items else 0
    return [*items[first:], *items[:first]]


def in_turns(items: Sequence[T], repeats: int, *, warm_up: int = 0) -> Iterator[tuple[int, T]]:
    """Yield every item once a repeat, each repeat beginning with the next item.

    Args:
        items: what takes turns.
        repeats: that count, numbered from 0.
        warm_up: repeats before them, with numbers below 0.

    Yields:
        The number of the repeat, and the item.
    """
    for repeat in range(-warm_up, repeats):
        for item in rotated(items, repeat):
            yield repeat, item


def fastest(call: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Return the seconds of one call: the best of many samples, each long enough for the clock.

    Args:
        call: what is timed.
        device: is waited for around every sample.
        seconds: time for all samples.
    """
    watch = Stopwatch(device)

    def sample(count: int) -> float:
        watch.start()
        for _ in range(count):
            call()
        return watch.lap() / count

    call()
    best = sample(1)
    count = max(1, int(0.005 / best))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, sample(count))
    return best


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set torch's CPU threads for the time being; None leaves them as they are."""
    import torch

    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
