"""Finds the components that are installed, one plug-in apart from the other.

A plug-in that cannot be imported, misspells the hook or raises in it is recorded and warned about;
it is fatal only to an experiment that names one of its components. Two plug-ins with one name do
not shadow each other: both are then called by ``distribution/name``.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from falcon_lab import __version__
from falcon_lab.errors import FalconLabError, PluginWarning
from falcon_lab.plugins import builtins, hooks
from falcon_lab.plugins.hooks import PROJECT, Component, Register
from falcon_lab.plugins.registry import Components, Failure

ALLOW_LIST = "FALCON_LAB_PLUGINS"
"""Environment variable: the only distributions whose plug-ins are loaded, comma-separated. Empty
leaves the built-ins alone; unset loads everything."""


def load_components() -> Components:
    """Return the built-in components and those of every installed plug-in that loads."""
    components = registered_by(builtins, "falcon-lab", __version__)
    failures = []
    for entry_point, distribution, version in _plugins():
        try:
            components += registered_by(entry_point.load(), distribution, version)
        except (Exception, SystemExit) as error:  # a plug-in may do anything when imported
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            failures.append(Failure(distribution, version, entry_point.name, reason))
    failures += _missing()
    for failure in failures:
        warnings.warn(str(failure), PluginWarning, stacklevel=2)
    return Components(components, failures)


def _plugins() -> Iterator[tuple[EntryPoint, str, str]]:
    allowed = _allowed()
    for entry_point in entry_points(group=PROJECT):
        distribution = entry_point.dist
        name, version = (distribution.name, distribution.version) if distribution else ("?", "?")
        if allowed is None or _normalised(name) in allowed:
            yield entry_point, name, version


def _missing() -> Iterator[Failure]:
    """Report distributions that the allow-list names and that bring no plug-in."""
    present = {_normalised(name) for _, name, _ in _plugins()}
    for name in sorted((_allowed() or set()) - present):
        yield Failure(name, "", "", f"{ALLOW_LIST} names it, and no plug-in of it is installed")


def _allowed() -> set[str] | None:
    listed = os.environ.get(ALLOW_LIST)
    if listed is None:
        return None
    return {_normalised(name) for name in listed.split(",") if name.strip()}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def registered_by(module: Any, distribution: str, version: str) -> list[Component]:
    """Return what one plug-in registers; all of it or, when it raises, nothing.

    Each plug-in gets a manager of its own, so that what one of them breaks stays with it.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(module)
    manager.check_pending()  # a misspelt hook would otherwise be ignored in silence
    if not manager.hook.register_components.get_hookimpls():
        raise FalconLabError("it has no @hookimpl function register_components(register)")
    register = Register(distribution, version)
    manager.hook.register_components(register=register)
    return register.components
