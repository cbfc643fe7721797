"""What operations make, seen from below."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation makes while it is entered."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(each.numel() for each in _tensors(made))])
        return made


def _tensors(made: Any) -> Iterator[Tensor]:
    for each in made if isinstance(made, tuple | list) else [made]:
        if isinstance(each, Tensor):
            yield each
