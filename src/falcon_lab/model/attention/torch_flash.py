"""PyTorch's own FlashAttention, on a GPU and on a CPU.

The public ``scaled_dot_product_attention`` does not return the log-sum-exp; the operators below it
give it. ``torch.nn.attention.varlen`` wraps the same GPU kernel for sequences of unequal lengths,
which those of a prefix are not, and it has no CPU form.

Shapes: B batch, A query heads, G key/value heads, N new tokens, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from falcon_lab.model.attention.backend import Partial

ON_GPU = torch.ops.aten._scaled_dot_product_flash_attention.default
ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class TorchFlash:
    """The kernel that PyTorch brings."""

    name: str = "torch_flash"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Why it cannot run on such tensors here, or None."""
        if device.type == "cpu":
            return None if dtype.is_floating_point else f"it does not support {dtype}"
        if device.type != "cuda":
            return f"it runs on cpu and cuda, not on {device.type}"
        if not torch.backends.cuda.is_flash_attention_available():
            return "this build of PyTorch has none"
        return refused_by_gpu(device, dtype, head_size)

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        """Attend; arguments as in ``Kernel``."""
        if query.is_cuda:
            seen, lse = ON_GPU(query, keys, values, 0.0, causal, False, scale=scale)[:2]
        else:
            seen, lse = ON_CPU(query, keys, values, 0.0, causal, scale=scale)
        return Partial(seen, lse)


def refused_by_gpu(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """What FlashAttention 2 asks of a GPU and of the tensors on it."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"on a GPU it supports float16 and bfloat16, not {dtype}".replace("torch.", "")
    if head_size > LARGEST_HEAD or head_size % 8:
        return f"it supports heads of 8, 16, … {LARGEST_HEAD} numbers, not {head_size}"
    if _capability(device.index) < (8, 0):
        return "the GPU is older than Ampere"
    return None


@lru_cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)
