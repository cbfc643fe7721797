"""Makes distributions that ``importlib.metadata`` finds, as an installer leaves them."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest


class Site:
    """A folder on Python's path; of all that is installed, only its plug-ins are allowed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self._allowed: list[str] = []
        self._modules: list[str] = []
        monkeypatch.syspath_prepend(str(folder))

    def install(
        self,
        distribution: str,
        source: str,
        *,
        version: str = "0.1",
        entry_points: str | None = None,
        metadata: str = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    ) -> str:
        """Install a distribution of one module, and return the module's name.

        ``{module}`` in the entry points stands for it; by default they name it.
        """
        module = distribution.replace("-", "_")
        self._modules.append(module)
        (self.folder / f"{module}.py").write_text(source, encoding="utf-8")
        info = self.folder / f"{module}-{version}.dist-info"
        info.mkdir()
        facts = metadata.format(name=distribution, version=version)
        (info / "METADATA").write_text(facts, encoding="utf-8")
        points = entry_points if entry_points is not None else "{module} = {module}"
        (info / "entry_points.txt").write_text(f"[falcon_lab]\n{points.format(module=module)}\n")
        self.allow(distribution)
        return module

    def allow(self, name: str) -> None:
        """Allow the plug-ins of one more distribution, whatever else is installed here."""
        self._allowed.append(name)
        self._monkeypatch.setenv("FALCON_LAB_PLUGINS", ",".join(self._allowed))

    def forget(self) -> None:
        """Forget what was imported."""
        for name in [n for n in sys.modules if n.partition(".")[0] in self._modules]:
            del sys.modules[name]


def install_in_place(project: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a distribution of this repository one that is installed, and its plug-ins the only ones.

    Args:
        project: its folder, with a ``pyproject.toml``.
        site: a folder for what an installer leaves.
        monkeypatch: undoes it.
    """
    facts = tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = facts["name"], facts["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = [f"{key} = {value}" for key, value in facts["entry-points"]["falcon_lab"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[falcon_lab]", *points]), encoding="utf-8")
    for path in (project / "src", site):
        monkeypatch.syspath_prepend(str(path))
    monkeypatch.setenv("FALCON_LAB_PLUGINS", name)
