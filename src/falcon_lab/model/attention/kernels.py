"""The attention kernels that there are, and which of them a machine can run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from falcon_lab.model.attention.backend import Kernel
from falcon_lab.model.attention.flash_attn import FlashAttn
from falcon_lab.model.attention.torch_flash import TorchFlash

KERNELS: tuple[Kernel, ...] = (FlashAttn(), TorchFlash())


def usable_kernels(
    device: torch.device, dtype: torch.dtype, head_size: int, kernels: Sequence[Kernel] = KERNELS
) -> list[Kernel]:
    """Return the kernels that run on such tensors on this machine."""
    return [kernel for kernel in kernels if kernel.refuses(device, dtype, head_size) is None]
