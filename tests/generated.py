"""Distributions as ``falcon-lab new-plugin`` writes them; run by itself, lints and types them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from falcon_lab.plugins.discovery import load_components
from falcon_lab.scaffolding.plugin import KINDS, rendered, write_plugin

RULES = "E,F,W,I,UP,B,SIM,PTH,RUF,ANN,PT"


def write_all(into: Path) -> dict[str, Path]:
    """A distribution of every kind, by its name."""
    known = load_components()
    return {f"new-{kind}": write_plugin(f"new-{kind}", kind, into, known) for kind in KINDS}


@cache
def modules(kind: str) -> tuple[ModuleType, ModuleType]:
    """The package of a generated distribution and its module, imported without a file."""
    package = f"generated_{KINDS[kind].kind}"
    texts = rendered(package, package, kind)
    made = []
    for name, path in (
        (package, f"src/{package}/__init__.py"),
        (f"{package}.{KINDS[kind].kind}", f"src/{package}/{KINDS[kind].kind}.py"),
    ):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        exec(compile(texts[path], path, "exec"), module.__dict__)
        made.append(module)
    return made[0], made[1]


def main(into: Path) -> int:
    """Lint and type all of them, and return 1 if anything was found in any."""
    folders = write_all(into).values()
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--no-cache", "--line-length=100"]
    check = [*ruff, "check", *style, f"--select={RULES}", "--ignore=ANN401,RUF001,RUF002", "."]
    form = [*ruff, "format", "--check", *style, "."]
    jobs = [(command, folder) for folder in folders for command in (check, form)]
    sources = [str(folder / "src") for folder in folders]
    jobs.append(([sys.executable, "-m", "mypy", "--strict", "--cache-dir=mypy", *sources], into))
    found = [subprocess.run(job, cwd=place, check=False).returncode for job, place in jobs]
    return int(any(found))


if __name__ == "__main__":
    # Not below the environment, whose folder ruff passes over.
    with tempfile.TemporaryDirectory() as into:
        sys.exit(main(Path(into)))
