"""``doctor``: what is installed, what it can use, and what to mend."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import click

from falcon_lab import __version__
from falcon_lab.files import cache_folder
from falcon_lab.plugins.discovery import ALLOW_LIST, load_components

OURS = "falcon-lab"
MENDABLE = 3
"""Exit code when something is to be mended; 1 is a crash, and 2 an error of the command line."""

REQUIRED = (
    "torch",
    "lightning",
    "transformers",
    "wandb",
    "omegaconf",
    "pluggy",
    "click",
    "safetensors",
    "tokenizers",
    "matplotlib",
)
OPTIONAL = {
    "datasets": "extra 'data': prompt sets from the hub",
    "gguf": "extra 'gguf': targets in GGUF files",
    "accelerate": "extra 'gguf': targets in GGUF files",
}
MALWARE = {"lightning": ("2.6.2", "2.6.3")}
"""Versions that must not be imported (GHSA-w37p-236h-pfx3)."""


@click.command()
def doctor() -> None:
    """Print what is installed, what it can use, and what to mend; exit 3 if anything is."""
    mendable = False
    for finding in examine():
        click.echo(str(finding))
        mendable |= bool(finding.advice)
    click.get_current_context().exit(MENDABLE if mendable else 0)


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Attributes:
        name: what was looked at.
        state: how it is.
        advice: what to do; empty when all is well.
    """

    name: str
    state: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{'!' if self.advice else ' '} {self.name:<18} {self.state}"
        return f"{line}\n  {'':<18} -> {self.advice}" if self.advice else line


def examine() -> Iterator[Finding]:
    """Check everything, one finding at a time; imports torch."""
    yield Finding("falcon-lab", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    versions = [package(name) for name in REQUIRED]
    yield from versions
    if not any(finding.advice for finding in versions if finding.name == "torch"):
        yield from devices()
        yield attention()
    yield from optional_packages()
    yield from plug_ins()
    yield cache()
    yield lightning_script()


def package(name: str) -> Finding:
    """Check for a required package."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "not installed", f"pip install {name}")
    if found in MALWARE.get(name, ()):
        advice = "remove it and change your passwords; pip install 'lightning>=2.6.4,<3'"
        return Finding(name, f"{found} is malware (GHSA-w37p-236h-pfx3)", advice)
    return Finding(name, found)


def devices() -> Iterator[Finding]:
    """Count cores and GPUs."""
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpu", f"{usable} cores for this process, torch uses {torch.get_num_threads()}")
    yield bfloat16()
    if not torch.cuda.is_available():
        yield Finding("cuda", "none")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB")


BFLOAT16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
"""What torch calls the units of a processor that multiply bfloat16 -> their usual names."""


def bfloat16() -> Finding:
    """Report what the processor multiplies bfloat16 with, and how fast."""
    from falcon_lab.model.precision import TOKENS, bfloat16_gain, cpu_units

    known = cpu_units()
    units = [name for key, name in BFLOAT16_UNITS.items() if known.get(key)]
    gain = f"products of {TOKENS} tokens take 1/{bfloat16_gain():.1f} of float32's time"
    return Finding("bfloat16", f"{', '.join(units) or 'no units for it'}; {gain}")


def optional_packages() -> Iterator[Finding]:
    """Check for optional packages."""
    for name, use in OPTIONAL.items():
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, f"not installed ({use})")
    yield flash_attn()


def flash_attn() -> Finding:
    """Check for FlashAttention 2 as its own package."""
    from falcon_lab.model.attention.flash_attn import absence

    return Finding("flash-attn", absence() or "usable")


def attention() -> Finding:
    """List the values of ``target.attention`` that this machine can run."""
    import torch

    from falcon_lab.config.schema import ATTENTION
    from falcon_lab.model.attention.kernels import KERNELS, usable_kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable = [kernel.name for kernel in usable_kernels(device, torch.bfloat16, head_size=64)]
    measured = {"auto", *(kernel.name for kernel in KERNELS)}
    names = [*(name for name in ATTENTION if name not in measured), *usable]
    return Finding("attention", f"{', '.join(names)} (bfloat16, {device.type})")


def plug_ins() -> Iterator[Finding]:
    """List distributions that bring components, and those that did not load."""
    components = load_components().usable()
    owners = {(c.distribution, c.version) for c in components.components} - {(OURS, __version__)}
    for name, found in sorted(owners):
        own = [c for c in components.components if c.distribution == name]
        brought = [components.called(c.kind, c.full_name) for c in own]
        yield Finding("plug-in", f"{name} {found}: {', '.join(brought)}")
    for failure in components.failures:
        advice = f"mend or remove it, or leave it out with {ALLOW_LIST} (now: {allow_list()})"
        yield Finding("plug-in", str(failure), advice)


def allow_list() -> str:
    """Return the value of FALCON_LAB_PLUGINS."""
    return os.environ.get(ALLOW_LIST, "unset")


def cache() -> Finding:
    """Check the folder of targets that were trained once."""
    folder = cache_folder()
    if not folder.exists():
        return Finding("cache", f"{folder} (empty)")
    if not os.access(folder, os.W_OK):
        return Finding("cache", f"{folder} cannot be written", "set FALCON_LAB_CACHE to a folder")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Finding("cache", f"{folder} ({size / 2**20:.0f} MiB)")


def lightning_script() -> Finding:
    """Check whether the command ``lightning`` is ours: pip lets the last one installed have it."""
    try:
        ours = distribution(OURS)
    except PackageNotFoundError:
        return Finding("bin/lightning", "falcon-lab is not installed; python -m falcon_lab works")
    mend = f"pip install --force-reinstall --no-deps {OURS}, or use falcon-lab run"
    for file in ours.files or ():
        if file.name in ("lightning", "lightning.exe") and file.hash is not None:
            path = Path(str(ours.locate_file(file))).resolve()
            if not path.exists():
                return Finding("bin/lightning", "has been deleted", mend)
            if _sha256(path) != file.hash.value:
                return Finding("bin/lightning", f"{path} belongs to another package", mend)
            return Finding("bin/lightning", f"{path} is ours")
    return Finding("bin/lightning", "was not installed with falcon-lab", mend)


def _sha256(path: Path) -> str:
    """Return a digest as wheels' RECORD writes it."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
