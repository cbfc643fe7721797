"""Makes distributions that ``importlib.metadata`` finds, as an installer leaves them."""

from __future__ import annotations

import sys
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
