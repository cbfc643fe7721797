"""Stand-ins for what compiles passes: no C++ compiler and no GPU is needed, and nothing is fast.

compiler = Pretend()
compiled = drafter.compiled(print, compiler)
assert compiler.calls > 0  # after a few drafts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import Announce, Compiled, Outputs


class Pretend:
    """Run the module itself, and refuse what a compiled pass does not support.

    Attributes:
        names: of the passes that were requested.
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
        announce: Announce,
    ) -> Compiled:
        """As ``falcon_lab.model.compiled.compile_ahead``."""
        self.names.append(name)
        announce(name)

        def run(flat: list[Tensor]) -> list[Tensor]:
            self.calls += 1
            arguments = unflattened(flat, inputs)
            for given, example, dynamic in zip(arguments, inputs, dynamic_shapes, strict=True):
                _same(given, example, dynamic)
            with torch.no_grad():
                return list(module(*arguments))

        return run


def traced(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    name: str,
    announce: Announce,
) -> Compiled:
    """A compiler that traces, as ``compile_ahead`` does, and goes no further."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes).module()

    def run(flat: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(program(*unflattened(flat, inputs)))

    return run


class Repeating:
    """Repeat what was captured into the same outputs, as a graph does.

    Attributes:
        captures: how many there were.
        replays: of all of them together.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replays = 0

    def capture(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Do as ``falcon_lab.model.recording.Recorder``."""
        self.captures += 1
        outputs = tuple(output.clone() for output in run())

        def replay() -> Outputs:
            self.replays += 1
            for place, new in zip(outputs, run(), strict=True):
                place.copy_(new)
            return outputs

        return replay


def unflattened(flat: list[Tensor], inputs: tuple[Any, ...]) -> list[Any]:
    """Tensors in the order of a compiled pass, grouped as the module's arguments.

    Raises:
        AssertionError: there are more or fewer than in the example.
    """
    wanted = sum(len(example) if isinstance(example, list) else 1 for example in inputs)
    assert len(flat) == wanted, f"a pass of {wanted} tensors was given {len(flat)}"
    rest = iter(flat)
    return [
        [next(rest) for _ in example] if isinstance(example, list) else next(rest)
        for example in inputs
    ]


def _same(given: Any, example: Any, dynamic: Any) -> None:
    """Refuse a tensor, or any of a list, that is unlike what a pass was compiled for."""
    if isinstance(example, list):
        for of_list in zip(given, example, dynamic, strict=True):
            _same(*of_list)
        return
    alike = (given.dtype, given.dim()) == (example.dtype, example.dim())
    for place, (size, was) in enumerate(zip(given.shape, example.shape, strict=False)):
        kept = dynamic[place].min <= size <= dynamic[place].max if place in dynamic else size == was
        alike = alike and kept
    assert alike, (
        f"{given.dtype} {list(given.shape)} does not go into a pass for {example.dtype} "
        f"{list(example.shape)}, open in {sorted(dynamic)}"
    )
