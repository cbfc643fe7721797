"""``torch.compile`` with a way back."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from falcon_lab.errors import first_line

Call = Callable[..., Tensor]
Compiler = Callable[[Call], Call]


class Compiled:
    """A call through ``torch.compile``; where compiling fails, announced once, the plain one.

    Compiling happens in the first calls and again for shapes that are new; a failure may come from
    the system (no C++ compiler) as well as from the code.

    Args:
        call: what is compiled; a module keeps its weights.
        what: its name in the warning.
        compiler: ``torch.compile`` with its settings.
    """

    def __init__(self, call: Call, what: str, compiler: Compiler = torch.compile) -> None:
        self._plain, self._what = call, what
        self._fast: Call | None = compiler(call)

    def __call__(self, **arguments: Any) -> Tensor:
        """Return the same tensor compiled or not, to rounding."""
        if self._fast is None:
            return self._plain(**arguments)
        try:
            return self._fast(**arguments)
        except Exception as error:  # whatever Dynamo, Inductor and the C++ compiler raise
            result = self._plain(**arguments)  # wrong arguments raise here too
            self._fast = None
            text = f"{self._what} cannot be compiled ({first_line(error)}); going on without"
            warnings.warn(text, stacklevel=2)
            return result
