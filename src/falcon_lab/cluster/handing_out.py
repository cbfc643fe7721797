"""Hand units of work out to the actors of a Ray cluster, of which any may die.

A unit is written whole or not at all, so that one whose actor died is given to another. Of Ray this
needs ``wait``, ``get`` and the error by which ``get`` says that an actor is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from falcon_lab.cluster.worker import Unit
from falcon_lab.errors import FalconLabError, first_line

POLL = 0.2
"""Seconds of a wait; inside a longer one Ray looks for signals, and drops what they raise."""


class Crew:
    """The actors that are alive.

    Args:
        ray: the module.
        actors: name -> handle of a ``DataWorker``.
        announce: is called with one line where one dies.
    """

    def __init__(
        self, ray: Any, actors: Mapping[str, Any], announce: Callable[[str], None]
    ) -> None:
        self._ray, self._actors, self._announce = ray, dict(actors), announce

    def __len__(self) -> int:
        return len(self._actors)

    def ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Return what every actor answers; those that die are left out.

        Raises:
            FalconLabError: one refuses, or all are dead.
        """
        asked = {name: self._ask(name, method, *arguments) for name in self._actors}
        return {name: value for name, ref in asked.items() for value in self._answers(name, ref)}

    def ask_one(self, method: str, *arguments: Any) -> Any:
        """Return what one of the actors answers; the next is asked where it dies.

        Raises:
            FalconLabError: as ``ask_all``.
        """
        while True:
            name = next(iter(self._actors))
            for value in self._answers(name, self._ask(name, method, *arguments)):
                return value

    def hand_out(self, units: Sequence[Unit], done: Callable[[Unit], None]) -> None:
        """Have every unit written, once.

        Args:
            units: of any order.
            done: is called with each that is written.

        Raises:
            FalconLabError: as ``ask_all``.
        """
        left, free = deque(units), deque(self._actors)
        busy: dict[Any, tuple[str, Unit]] = {}
        while left or busy:
            while left and free:
                name, unit = free.popleft(), left.popleft()
                busy[self._ask(name, "write", unit)] = (name, unit)
            ref = self._first_of(list(busy))
            name, unit = busy.pop(ref)
            if self._answers(name, ref, f" while it wrote {unit}"):
                free.append(name)
                done(unit)
            else:
                left.appendleft(unit)

    def _first_of(self, refs: Sequence[Any]) -> Any:
        """Return the first that is answered or lost; signals are received in between."""
        while True:
            ready, _ = self._ray.wait(refs, num_returns=1, timeout=POLL)
            if ready:
                return ready[0]

    def _ask(self, name: str, method: str, *arguments: Any) -> Any:
        return self._actors[name].answer.remote(method, *arguments)

    def _answers(self, name: str, ref: Any, doing: str = "") -> list[Any]:
        """Return an actor's answer in a list; an empty one where it has died.

        Raises:
            FalconLabError: it refuses, or it was the last one.
        """
        self._first_of([ref])
        try:
            answer = self._ray.get(ref)
        except self._ray.exceptions.RayActorError as error:
            del self._actors[name]
            why = f"{name} has died{doing} ({_reason(error):.200})"
            if not self._actors:
                raise FalconLabError(
                    f"--ray: {why}, and it was the last one; see that each has the same "
                    "falcon-lab and memory enough, and give the same command again: what was "
                    "written is there"
                ) from error
            self._announce(f"{why}; {len(self._actors)} go on")
            return []
        if answer.refused is not None:
            raise FalconLabError(answer.refused)
        return [answer.value]


def _reason(error: Exception) -> str:
    """Return why an actor is gone: the last line of what ended its beginning, else Ray's first."""
    first, last = first_line(error), str(error).strip().splitlines()[-1:]
    return last[0] if last and "creation task" in first else first
