"""A module over tensors of one shape, compiled or replayed as a CUDA graph."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from falcon_lab.interfaces import Announce, Compiled, Outputs, PassCompiler, Recorder, Run
from falcon_lab.model.compiled import compile_ahead
from falcon_lab.model.recording import Attempts, recorder_for


class FixedPass:
    """A module that keeps nothing between its calls. Copies share what is compiled.

    Args:
        module: tensors in, a tuple of tensors out, and always of the same shapes.
        example: inputs like those to come, where they will be.
        name: of the pass, for the user.
        announce: takes one line for the user at a time.
        compiler: makes the pass on a CPU.
        recorder: captures a graph; None: on a GPU alone.
    """

    def __init__(
        self,
        module: nn.Module,
        example: tuple[Tensor, ...],
        name: str,
        announce: Announce,
        compiler: PassCompiler = compile_ahead,
        recorder: Recorder | None = None,
    ) -> None:
        self._module, self._name, self._announce = module, name, announce
        self._compiler = compiler
        self._passes: dict[int, Compiled] = {}  # by the number of threads
        with torch.inference_mode(False):
            self._inputs = tuple(part.detach().clone() for part in example)
        recorder = recorder or recorder_for(example[0].device)
        self._attempts = None if recorder is None else Attempts(name, recorder, announce)
        self._graph: Run | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def prepare(self) -> None:
        """Compile or load the pass now, if it is to be compiled."""
        if self._attempts is None:
            self._compiled()

    @torch.no_grad()
    def __call__(self, *given: Tensor) -> Outputs:
        """The module's outputs, the caller's own to keep."""
        if self._attempts is None:
            return tuple(self._compiled()(list(given)))
        for buffer, value in zip(self._inputs, given, strict=True):
            buffer.copy_(value)
        if self._graph is None:
            self._graph = self._attempts.capture(lambda: self._module(*self._inputs))
        if self._graph is None:
            outputs: Outputs = self._module(*given)
            return outputs
        return tuple(output.clone() for output in self._graph())

    def _compiled(self) -> Compiled:
        threads = torch.get_num_threads()
        run = self._passes.get(threads)
        if run is None:
            run = self._passes[threads] = self._compiler(
                self._module,
                self._inputs,
                tuple({} for _ in self._inputs),
                name=self._name,
                announce=self._announce,
            )
        return run
