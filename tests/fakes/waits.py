"""Counts what would make the host wait for a device, were the tensors on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
READS = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.unique_consecutive.default,
    ATEN._unique2.default,
    ATEN.equal.default,
}
"""Operators whose result, or its shape, the host must know."""

INDEXED = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default}
"""Operators that look for what is true, where an index is boolean."""

ASKED = {
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.item,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__bool__,
    Tensor.__index__,
}
"""Copies to the host that no operator shows while the tensor is there already."""

MADE = {torch.tensor, torch.as_tensor, torch.from_numpy}
"""Tensors out of the host's values: a copy to the device, which is waited for."""


class Waits(TorchDispatchMode):
    """What was done, by name, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS or (func in INDEXED and _boolean(args[1])):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """The same for what operators do not show."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        single = func is Tensor.__getitem__ and _single(args[1])
        if func in ASKED or func in MADE or single:
            self.seen.append("[0-d tensor]" if single else func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[list[str]]:
    """The names of all waits inside, in order."""
    mode = Waits()
    with mode, Asked(mode.seen):
        yield mode.seen


def _single(index: Any) -> bool:
    """Whether an index is a number that lies on the device."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dim() == 0 for part in parts)


def _boolean(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
