"""A compiler that traces and goes no further."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from falcon_lab.testing.compiling import unflattened


def traced(
    module: nn.Module,
    inputs: tuple[Any, ...],
    dynamic_shapes: tuple[Any, ...],
    *,
    name: str,
    announce: Callable[[str], None],
) -> Callable[[list[Tensor]], list[Tensor]]:
    """As ``compile_ahead``."""
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes).module()

    def run(flat: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return list(program(*unflattened(flat, inputs)))

    return run
