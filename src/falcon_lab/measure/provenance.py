"""State where a result came from: one header for every file of results."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falcon_lab.model.target import Target

PACKAGES = (
    "falcon-lab",
    "torch",
    "lightning",
    "transformers",
    "tokenizers",
    "omegaconf",
    "pluggy",
    "safetensors",
    "wandb",
    "numpy",
    "matplotlib",
)


def header(
    target: Target | None = None,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    threads: int | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Return what every file of results begins with.

    Ask for it before the measurement: its load is then that of the other processes.

    Args:
        target: the model; its device and type are the hardware's.
        device: where it runs, without a target.
        dtype: of the tensors, without a target.
        threads: CPU threads while measuring; None asks torch.
        folder: whose git state is read; None: the current one.

    Returns:
        ``date``, ``command``, ``versions``, ``hardware`` and ``git``.
    """
    if target is not None:
        device, dtype = str(target.device), str(target.dtype)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "versions": versions(),
        "hardware": hardware(device=device, dtype=dtype, threads=threads),
        "git": git_state(folder),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of what a result may depend on; None where absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found["falcon-lab"] is None:  # run from a checkout that is not installed
        from falcon_lab import __version__

        found["falcon-lab"] = __version__
    return found


def target_of(target: Target, quality: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the target as results describe it; ``quality`` is known of one that was made here."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "dtype": str(target.dtype),
        "quality": quality,
        "tuning": target.tuning,
    }


def hardware(
    *, device: str = "cpu", dtype: str | None = None, threads: int | None = None
) -> dict[str, Any]:
    """Return the machine, and how it was used.

    Args:
        device: where decoding ran.
        dtype: of the target.
        threads: CPU threads while decoding; None asks torch.
    """
    import torch

    gpu = memory = None
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device))
        gpu, memory = properties.name, properties.total_memory
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads": threads if threads is not None else torch.get_num_threads(),
        "load": _load(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "gpu": gpu,
        "gpu_memory_bytes": memory,
        "cuda": torch.version.cuda if gpu else None,
        "dtype": dtype,
    }


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's own name, or what the platform calls it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Count the cores that this process may use: a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load() -> float | None:
    """Return how many processes wanted a core over the last minute: others disturb timings."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit and whether tracked files differ from it; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path | None, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder or Path.cwd(),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command_line() -> str:
    """Return what was typed, as far as Python knows, with the program's name alone."""
    import shlex

    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
