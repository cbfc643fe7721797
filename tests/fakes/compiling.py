"""A compiler that compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Pretend:
    """Runs the module itself, and refuses what a compiled pass could not take.

    Attributes:
        names: of the passes that were asked for.
        calls: how often any of them ran.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.calls = 0

    def __call__(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        dynamic_shapes: tuple[Any, ...],
        *,
        name: str,
        announce: Callable[[str], None],
    ) -> Callable[[list[Tensor]], list[Tensor]]:
        self.names.append(name)
        announce(name)

        def run(flat: list[Tensor]) -> list[Tensor]:
            self.calls += 1
            rest, arguments = list(flat), []
            for example, dynamic in zip(inputs, dynamic_shapes, strict=True):
                if isinstance(example, list):
                    taken = [rest.pop(0) for _ in example]
                    for pair in zip(taken, example, dynamic, strict=True):
                        _same(*pair)
                    arguments.append(taken)
                else:
                    arguments.append(rest.pop(0))
                    _same(arguments[-1], example, dynamic)
            assert not rest
            with torch.no_grad():
                return list(module(*arguments))

        return run


def traced(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    name: str,
    announce: Callable[[str], None],
) -> Callable[[list[Tensor]], list[Tensor]]:
    """A compiler that traces and goes no further."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes).module()
    layers = len(inputs[-1])

    def run(flat: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            small = flat[: -2 * layers]
            return list(program(*small, flat[-2 * layers : -layers], flat[-layers:]))

    return run


def _same(given: Tensor, example: Tensor, dynamic: dict[int, Any]) -> None:
    assert given.dtype == example.dtype
    assert given.dim() == example.dim()
    for place, (size, was) in enumerate(zip(given.shape, example.shape, strict=True)):
        if place in dynamic:
            assert dynamic[place].min <= size <= dynamic[place].max
        else:
            assert size == was
