"""What a processor multiplies with, and in which floating-point type it is fastest.

That is measured rather than looked up.

Processors with the same units differ: with AVX512-BF16 and no AMX, products of many tokens take
between a quarter and 1.8 times of float32's time.

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from falcon_lab.timing import fastest

TOKENS = 128
"""Tokens of a wide pass: many texts side by side, or a prompt."""
HIDDEN = 1024
"""Width of the map that is timed."""
SECONDS = 0.02
"""Time for each type, in which the best of several products is taken."""


def cpu_units() -> Mapping[str, Any]:
    """Return what torch knows of the processor's units; some releases of it say nothing."""
    read = getattr(torch.cpu, "get_capabilities", dict)
    found: Mapping[str, Any] = read()
    return found


@cache
def bfloat16_gain() -> float:
    """Return how many times as fast this processor multiplies in bfloat16 as in float32.

    ``[T, H]`` by a weight ``[H, H]`` on torch's threads, the best of several products in each type.
    """
    cpu = torch.device("cpu")

    def product_seconds(dtype: torch.dtype) -> float:
        hidden = torch.ones(TOKENS, HIDDEN, dtype=dtype)
        weight = torch.ones(HIDDEN, HIDDEN, dtype=dtype)
        return fastest(lambda: functional.linear(hidden, weight), cpu, seconds=SECONDS)

    with torch.inference_mode():
        return product_seconds(torch.float32) / product_seconds(torch.bfloat16)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return the type in which many texts side by side are written fastest.

    A GPU is not asked: those that run language models have units for bfloat16.
    """
    faster = device.type == "cuda" or bfloat16_gain() > 1
    return torch.bfloat16 if faster else torch.float32
