"""FlashAttention 2 as its own package, the extra ``flash`` (Dao, arXiv 2307.08691).

Shapes: B batch, A query heads, G key/value heads, N new tokens, S keys, D head size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from falcon_lab.model.attention.backend import Partial
from falcon_lab.model.attention.torch_flash import refused_by_gpu


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """The kernel of the package ``flash_attn``, which splits long caches among the GPU's cores."""

    name: str = "flash_attn"

    def refuses(self, device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
        """Why it cannot run on such tensors here, or None."""
        if reason := absence():
            return reason
        if device.type != "cuda":
            return f"it runs on cuda, not on {device.type}"
        return refused_by_gpu(device, dtype, head_size)

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, *, scale: float, causal: bool = False
    ) -> Partial:
        """Attend; arguments as in ``Kernel``. Theirs have the tokens before the heads."""
        seen, lse = _function()(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            softmax_scale=scale,
            causal=causal,
            return_softmax_lse=True,
        )
        return Partial(seen.transpose(1, 2), lse)


def absence() -> str | None:
    """Why the package cannot be used, or None: other distributions own its import name too."""
    try:
        _function()
    except ImportError:
        return "not installed (extra 'flash')"
    except AttributeError:
        return "another package of that name; it is not used"
    return None


def _function() -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_with_kvcache
    return function
