"""Numbers that the host knows, on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def send(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """``[n, …]`` long from (nested) integers.

    The host does not wait for a GPU to finish what it is doing, as it does for ``torch.tensor``.
    """
    made = torch.tensor(numbers, dtype=torch.long)
    return made if device.type == "cpu" else to_device(made, device)


def to_device(made: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, sent without waiting where it can be."""
    if device.type == "cuda":
        made = made.pin_memory()
    return made.to(device, non_blocking=True)
