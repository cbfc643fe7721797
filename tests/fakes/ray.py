"""The part of Ray that a cluster's work needs, in this process; actors die when they are told."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any


class RayActorError(Exception):
    """Is raised for what a dead actor was asked."""


class Ref:
    """What an actor has answered, or raised."""

    def __init__(self, value: Any = None, error: Exception | None = None) -> None:
        self.value, self.error = value, error


class Handle:
    """An actor: its one method, called by ``remote``.

    Args:
        made: the object.
        dies: the numbers of the units with which it dies; None has it die at once.
        wrote: whether it does so behind a unit, in place of before it.
        why: what is said of it then.
    """

    def __init__(self, made: Any, dies: int | None, wrote: bool, why: str) -> None:
        self.made, self.dies, self.wrote, self.why = made, dies, wrote, why
        self.units = 0
        self.dead = dies == 0
        self.answer = SimpleNamespace(remote=self._answer)

    def _answer(self, method: str, *arguments: Any) -> Ref:
        if method == "write":
            self.units += 1
            if self.units == self.dies:
                if self.wrote:
                    self.made.answer(method, *arguments)
                self.dead = True
        if self.dead:
            return Ref(error=RayActorError(self.why))
        travelled = pickle.loads(pickle.dumps(arguments))
        return Ref(pickle.loads(pickle.dumps(self.made.answer(method, *travelled))))


class FakeRay:
    """The module.

    Args:
        dies: of each actor, with which of its units it dies; 0 has it die before all.
        wrote: whether a unit is there when its actor dies.
        gpus: of the cluster.
        refusal: what ``init`` raises.
        why: what is said of an actor that has died.
    """

    exceptions = SimpleNamespace(RayActorError=RayActorError)

    def __init__(
        self,
        *dies: int | None,
        wrote: bool = False,
        gpus: int = 0,
        refusal: Exception | None = None,
        why: str = "the worker died\nwith a stack",
    ) -> None:
        self._why, self._waits = why, 0
        self._dies, self._wrote, self._gpus, self._refusal = list(dies), wrote, gpus, refusal
        self.actors: list[Handle] = []
        self.given: dict[str, Any] = {}
        self.is_up = False

    def init(self, **given: Any) -> None:
        self.given = given
        if self._refusal is not None:
            raise self._refusal
        self.is_up = True

    def shutdown(self) -> None:
        self.is_up = False

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0} | ({"GPU": float(self._gpus)} if self._gpus else {})

    def nodes(self) -> list[str]:
        return ["node", "node"]

    def remote(self, kind: Any) -> Any:
        def options(**resources: Any) -> Any:
            return SimpleNamespace(remote=lambda *given: self._start(kind, resources, *given))

        return SimpleNamespace(options=options)

    def wait(
        self, refs: Sequence[Ref], num_returns: int, timeout: float
    ) -> tuple[list[Ref], list[Ref]]:
        self._waits += 1
        if self._waits % 3 == 0:
            return [], list(refs)
        return list(refs[:num_returns]), list(refs[num_returns:])

    def get(self, ref: Ref) -> Any:
        if ref.error is not None:
            raise ref.error
        return ref.value

    def _start(self, kind: Any, resources: dict[str, Any], *given: Any) -> Handle:
        dies = self._dies[len(self.actors)] if len(self.actors) < len(self._dies) else None
        made = kind(*pickle.loads(pickle.dumps(given)))
        self.actors.append(Handle(made, dies, self._wrote, self._why))
        self.resources = resources
        return self.actors[-1]
