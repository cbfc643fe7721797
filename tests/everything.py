"""Every component in this repository: the built-in ones and those of the folders in ``plugins``."""

from __future__ import annotations

import sys
import tomllib
from functools import cache
from importlib import import_module

import falcon_lab
from falcon_lab import builtins, hookspecs
from falcon_lab.components import Components
from falcon_lab.plugins import Registrar
from running import ROOT


@cache
def everything() -> Components:
    """The registry; plug-ins are read where they are, installed or not."""
    found = [registered(builtins, "falcon-lab", falcon_lab.__version__)]
    for folder in sorted((ROOT / "plugins").glob("*/")):
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        source = str(folder / "src")
        if source not in sys.path:
            sys.path.insert(0, source)
        for module in project["entry-points"][hookspecs.PROJECT].values():
            found.append(registered(import_module(module), project["name"], project["version"]))
    return Components([component for registrar in found for component in registrar.components])


def registered(module: object, name: str, version: str) -> Registrar:
    """What a module's hook registers."""
    registrar = Registrar(name, version)
    module.register_components(registrar)  # type: ignore[attr-defined]
    return registrar
