"""Check that a sequence's KV caches fit, before they are allocated.

What a forward pass needs besides is not counted: it is bounded by ``decoding.prefill_chunk``, not
by the length of the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.model.memory import GIB, free_memory, gib

SMALL = 2**24
"""Bytes that are allocated without a check, which costs a tenth of a millisecond."""


def check_kv_memory(
    bytes_of: Callable[[int], int],
    length: int,
    *,
    limit_gib: float | None,
    device: torch.device,
    sequences: int = 1,
    allocated: int = 0,
) -> None:
    """Check that the caches of a sequence fit.

    Args:
        bytes_of: the memory of a sequence of so many tokens; grows with them.
        length: tokens of the sequence, prompt and new ones.
        limit_gib: GiB that may be taken; None is what the device has free.
        device: where.
        sequences: how many of that length lie side by side; ``bytes_of`` counts all of them.
        allocated: bytes that the caches of the sequence before have, and that are used again.

    Raises:
        FalconLabError: they do not, with the length that would.
    """
    needed = bytes_of(length)
    if limit_gib is None and needed <= max(SMALL, allocated):
        return
    there = free_memory(device) if limit_gib is None else int(limit_gib * GIB)
    if there is not None and limit_gib is None:
        there += allocated
    if there is None or needed <= there:
        return
    fits = bisect_right(range(length), there, key=bytes_of) - 1
    where = f"are free on {device}" if limit_gib is None else "are allowed by decoding.kv_memory"
    of = f"{sequences} sequences of " if sequences > 1 else ""
    instead = f"at most {fits} tokens fit" if fits > 0 else "not even one token fits"
    raise FalconLabError(
        f"the key/value caches of {of}{length} tokens (the prompt and max_new_tokens) take "
        f"{gib(needed)} and {gib(there)} {where}; {instead}: shorten the prompt, ask for fewer "
        "new tokens, or make room"
    )
