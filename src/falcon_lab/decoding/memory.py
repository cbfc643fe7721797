"""Check that a sequence's KV caches fit, before they are allocated.

What a forward pass needs besides is not counted: it is bounded by ``decoding.prefill_chunk``, not
by the length of the text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from falcon_lab.errors import FalconLabError

GIB = 2**30

SMALL = 2**24
"""Bytes that are allocated without a check, which costs a tenth of a millisecond."""

UNLIMITED = 2**60
"""Bytes that no machine has; version 1 of the control groups says "no limit" so."""

SYSTEM = Path("/")
"""Where Linux describes its memory: ``proc`` and ``sys`` lie below."""


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
        f"{_gib(needed)} and {_gib(there)} {where}; {instead}: shorten the prompt, ask for fewer "
        "new tokens, or make room"
    )


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device; None where that is unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has reserved and does not use is as good as free.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    return _free_of_system(SYSTEM) if device.type == "cpu" else None


def _free_of_system(root: Path) -> int | None:
    """Return the least of what the machine and the process's control groups have free."""
    found = [_available(root / "proc/meminfo")]
    found += [group.free for group in _groups(root)]
    return min((free for free in found if free is not None), default=None)


def _available(meminfo: Path) -> int | None:
    """Return ``MemAvailable``: what programs can get without swapping (proc(5))."""
    try:
        text = meminfo.read_text()
    except OSError:
        return None
    _, found, rest = text.partition("MemAvailable:")
    return int(rest.split(maxsplit=1)[0]) * 1024 if found else None


class Group(NamedTuple):
    """A control group that limits memory.

    Attributes:
        limit, used, stat: its files.
        reclaimable: what ``stat`` calls the used memory that can be had back at once.
    """

    limit: Path
    used: Path
    stat: Path
    reclaimable: str

    @property
    def free(self) -> int | None:
        """Its limit less what is used and could not be given back."""
        try:
            most, used = int(self.limit.read_text()), int(self.used.read_text())
            facts = self.stat.read_text()
        except (OSError, ValueError):  # not there, or no number: "max"
            return None
        _, found, rest = f"\n{facts}".partition(f"\n{self.reclaimable} ")
        return max(0, most - used + (int(rest.split(maxsplit=1)[0]) if found else 0))


@cache
def _groups(root: Path) -> tuple[Group, ...]:
    """List the control groups that the process is in, as far as they limit its memory."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found: list[Group] = []
    for line in lines:  # number:controllers:path
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root / "sys/fs/cgroup"
            names = "memory.max", "memory.current", "memory.stat", "inactive_file"
        else:
            base = root / "sys/fs/cgroup/memory"
            names = _VERSION_1
        if not controllers or "memory" in controllers.split(","):
            found += _limiting(base, path, names)
    return tuple(found)


_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "memory.stat",
    "total_inactive_file",
)


def _limiting(base: Path, path: str, names: tuple[str, str, str, str]) -> Iterator[Group]:
    """Yield a group and those around it; a container may know its own as the root."""
    own = base / path.lstrip("/")
    for folder in (own, *own.parents):
        if folder.is_relative_to(base):
            group = Group(folder / names[0], folder / names[1], folder / names[2], names[3])
            free = group.free
            if free is not None and free < UNLIMITED:
                yield group


def _gib(size: int) -> str:
    if size < GIB / 100:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / GIB:.3g} GiB"
