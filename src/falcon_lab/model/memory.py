"""What memory is free, and whether a model fits before its weights are made.

What a pass needs besides the weights, and training besides the model, is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from falcon_lab.errors import FalconLabError

GIB = 2**30

UNLIMITED = 2**60
"""Bytes that no machine has; version 1 of the control groups says "no limit" so."""

SYSTEM = Path("/")
"""Where Linux describes its memory: ``proc`` and ``sys`` lie below."""

MOST_LAYERS = 1000
"""Layers of a model whose weights are counted; no model has so many."""

UNCOUNTED = 2**28
"""Bytes that every machine has: models that cannot be larger are not counted."""


def check_room(
    config: Any, make: Callable[[], Any], what: str, *, device: torch.device | None = None
) -> int | None:
    """Check that a model fits before its weights are made; return how many numbers it has.

    None: it is too small to be counted.

    Args:
        config: its (text) configuration.
        make: makes it; here without any storage.
        what: names it, and the keys that make it smaller.
        device: where; None is where torch makes tensors: the machine itself, or nowhere (meta).

    Raises:
        FalconLabError: it does not fit, with what it takes.
    """
    layers = config.num_hidden_layers
    if layers > MOST_LAYERS:
        raise FalconLabError(f"{what}: {layers} layers; at most {MOST_LAYERS} are made")
    largest = max((abs(v) for v in vars(config).values() if type(v) is int), default=0)
    if (layers + 1) * largest**2 * 256 <= UNCOUNTED:  # 64 matrices a layer, of float32
        return None
    with torch.device("meta"):
        made = make()
    needed = sum(part.nbytes for part in (*made.parameters(), *made.buffers()))
    there = free_memory(device or torch.get_default_device())
    if there is not None and needed > there:
        where = f"on {device}" if device is not None else "here"
        raise FalconLabError(
            f"{what}: the model takes {gib(needed)}, and {gib(there)} are free {where}; choose a "
            "smaller one, or make room"
        )
    return sum(part.numel() for part in made.parameters())


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


def gib(size: int) -> str:
    """Return bytes in GiB, or in MiB where they are few."""
    if size < GIB / 100:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / GIB:.3g} GiB"
