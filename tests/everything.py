"""Every component in this repository: the built-in ones and those of the folders in ``plugins``."""

from __future__ import annotations

import sys
from functools import cache

import falcon_lab
from falcon_lab.plugins.discovery import builtins, registered_by
from falcon_lab.plugins.registry import Components
from falcon_lab.testing.distributions import registered
from running import ROOT


@cache
def everything() -> Components:
    """The registry; plug-ins are read where they are, installed or not."""
    found = registered_by(builtins, "falcon-lab", falcon_lab.__version__)
    for project in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        source = str(project.parent / "src")
        if source not in sys.path:
            sys.path.insert(0, source)
        found += registered(project.parent)
    return Components(found)
