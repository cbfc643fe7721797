"""Where the randomness of a training step comes from.

Everything random about a step follows from the run's seed, the batch and the process, never from
what happened before, so that a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from names and numbers; other parts give an unrelated one."""
    text = "\x1f".join(str(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator_for(*parts: int | str) -> torch.Generator:
    """A CPU generator of its own for a purpose; the same parts give the same numbers."""
    return torch.Generator().manual_seed(derive_seed(*parts))


@contextmanager
def seeded_dropout(seed: int, device: torch.device) -> Iterator[None]:
    """Within it, torch's global generators start from ``seed``; outside they are untouched.

    Dropout takes no generator; with the same seed two passes have the same dropout masks.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
