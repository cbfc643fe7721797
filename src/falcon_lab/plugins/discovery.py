"""Finds the components that are installed, one plug-in apart from the other.

A plug-in that cannot be imported, misspells the hook or raises in it is recorded and warned about;
it is fatal only to an experiment that names one of its components. No plug-in takes a name from
another: the bare name of a built-in component is the built-in's, one that two plug-ins have is
nobody's, and all of them are reached by ``distribution/name``.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any

import pluggy

from falcon_lab import __version__
from falcon_lab.errors import FalconLabError
from falcon_lab.plugins import builtins, hooks
from falcon_lab.plugins.foreign import CTRL_C, PluginError, foreign_code, said, shown, warn
from falcon_lab.plugins.hooks import BUILT_IN, PROJECT, Component, Register, owner_of
from falcon_lab.plugins.registry import Components, Failure

ALLOW_LIST = "FALCON_LAB_PLUGINS"
"""Environment variable: the only distributions whose plug-ins are loaded, comma-separated. Empty
leaves the built-ins alone; unset loads everything."""

UNREADABLE = (AttributeError, LookupError, OSError, TypeError, ValueError)
"""What ``importlib.metadata`` raises where the metadata of a distribution are damaged."""


LOADING: ContextVar[frozenset[str]] = ContextVar("LOADING", default=frozenset())
"""The plug-ins whose code is being run, to register what they bring."""


@dataclass(frozen=True)
class PlugIn:
    """An entry point, and the distribution that brings it."""

    entry_point: EntryPoint
    distribution: str
    version: str

    @property
    def owner(self) -> str:
        """Whose it is, for messages."""
        return owner_of(self.distribution, self.version, self.entry_point.name)

    def components(self, slow: str = CTRL_C) -> list[Component]:
        """Import the plug-in, and return what it registers.

        Args:
            slow: what to do where that takes long.

        Raises:
            FalconLabError: it has no hook, or its code raised something.
        """
        point = self.entry_point
        try:
            doing = f"importing {point.module}"
        except (AttributeError, ValueError) as error:
            raise FalconLabError(
                f"its entry point {shown(point.value)!r} names no module"
            ) from error
        with foreign_code(self.owner, doing, slow=slow):
            module = point.load()
        with foreign_code(self.owner, "register_components", slow=slow):
            return registered_by(module, self.distribution, self.version, point.name)

    def failure(self, error: FalconLabError) -> Failure:
        """Return what is recorded of one that did not load."""
        reason = error.reason if isinstance(error, PluginError) else said(error)
        return Failure(self.distribution, self.version, self.entry_point.name, reason)


def load_components() -> Components:
    """Return the built-in components and those of every installed plug-in that loads."""
    components = registered_by(builtins, BUILT_IN, __version__)
    found, failures = installed()
    for plug_in in found:
        if plug_in.owner in LOADING.get():
            continue  # it asks for the components while it registers its own
        token = LOADING.set(LOADING.get() | {plug_in.owner})
        try:
            without = _without(plug_in.distribution, found)
            brought = plug_in.components(f"{CTRL_C}, and {without} leaves it out")
        except FalconLabError as error:
            failures.append(plug_in.failure(error))
        else:
            failures += _registered_before(brought, components)
            components += [one for one in brought if not _among(one, components)]
        finally:
            LOADING.reset(token)
    for failure in failures:
        warn(str(failure))
    _name_those_hidden(components, found)
    return Components(components, failures)


def installed() -> tuple[list[PlugIn], list[Failure]]:
    """Return the plug-ins that ``FALCON_LAB_PLUGINS`` allows, and what cannot be read or found.

    They come in the order of their distributions' names.
    """
    found, failures = _read()
    found = sorted(found, key=lambda one: _normalised(one.distribution))
    allowed = _allowed()
    if allowed is not None:
        found = [one for one in found if _normalised(one.distribution) in allowed]
        present = {_normalised(one.distribution) for one in found}
        present |= {_normalised(one.distribution) for one in failures}
        problem = f"{ALLOW_LIST} names it, and no plug-in of it is installed"
        failures += [Failure(name, "", "", problem) for name in sorted(allowed - present)]
    return found, failures


def registered_by(
    module: Any, distribution: str, version: str, entry_point: str = ""
) -> list[Component]:
    """Return what one plug-in registers; all of it or, when it raises, nothing.

    Each plug-in gets a manager of its own, so that what one of them breaks stays with it.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(module)
    manager.check_pending()  # a misspelt hook would otherwise be ignored in silence
    if not manager.hook.register_components.get_hookimpls():
        raise FalconLabError("it has no @hookimpl function register_components(register)")
    register = Register(distribution, version, entry_point)
    for given in manager.hook.register_components(register=register):
        if inspect.isgenerator(given) or inspect.iscoroutine(given):
            given.close()
            raise FalconLabError("its register_components never runs: take yield and async out")
    return register.components


# --- names that are taken -----------------------------------------------------------------------


def _among(component: Component, others: Iterable[Component]) -> bool:
    names = {(other.kind, other.full_name) for other in others}
    return (component.kind, component.full_name) in names


def _registered_before(brought: Sequence[Component], known: Sequence[Component]) -> list[Failure]:
    """Report what another entry point of the same distribution has registered."""
    return [
        Failure(
            one.distribution,
            one.version,
            one.entry_point,
            f"another of its entry points registers {one.kind} {one.name!r} too",
        )
        for one in brought
        if _among(one, known)
    ]


def _name_those_hidden(components: Sequence[Component], found: Sequence[PlugIn]) -> None:
    """Warn once a distribution about names that belong to built-in components."""
    taken = {(one.kind, one.name) for one in components if one.built_in}
    hidden: dict[str, list[Component]] = {}
    for one in components:
        if not one.built_in and (one.kind, one.name) in taken:
            hidden.setdefault(one.distribution, []).append(one)
    for distribution, ones in hidden.items():
        names = ", ".join(f"{one.kind} {one.name!r}" for one in ones)
        full = ", ".join(dict.fromkeys(one.full_name for one in ones))
        warn(
            f"{ones[0].owner} registers {names}, which stays the built-in one; its own is {full}, "
            f"and {_without(distribution, found)} leaves it out"
        )


def _without(distribution: str, found: Iterable[PlugIn]) -> str:
    """Return the setting that allows all the others."""
    others = dict.fromkeys(one.distribution for one in found if one.distribution != distribution)
    return f"{ALLOW_LIST}={shlex.quote(','.join(others))}".removesuffix("''")


# --- metadata, which may be damaged -------------------------------------------------------------


def _read() -> tuple[list[PlugIn], list[Failure]]:
    try:
        return [_plug_in(one) for one in entry_points(group=PROJECT)], []
    except UNREADABLE:  # in one distribution, which is no reason to do without all others
        return _read_one_by_one()


def _read_one_by_one() -> tuple[list[PlugIn], list[Failure]]:
    found: dict[str, list[PlugIn]] = {}
    failures = []
    for distribution in distributions():
        name, version = _facts(distribution)
        try:
            points = distribution.entry_points.select(group=PROJECT)
        except UNREADABLE:
            problem = "its entry_points.txt is damaged; install it again"
            where = name or str(distribution.locate_file(""))
            failures.append(Failure(where, version, "", problem))
        else:  # the first on the path hides others of its name
            found.setdefault(_normalised(name), [_plug_in(one) for one in points])
    return [one for each in found.values() for one in each], failures


def _plug_in(entry_point: EntryPoint) -> PlugIn:
    """Return a plug-in by the name of its distribution, or its own where that has none."""
    name, version = _facts(entry_point.dist) if entry_point.dist else ("", "")
    return PlugIn(entry_point, name or shown(entry_point.name), version or "?")


def _facts(distribution: Distribution) -> tuple[str, str]:
    """Return name and version, "" where the metadata have none."""
    try:
        return shown(distribution.metadata["Name"] or ""), shown(distribution.version or "")
    except UNREADABLE:
        return "", ""


def _allowed() -> set[str] | None:
    listed = os.environ.get(ALLOW_LIST)
    if listed is None:
        return None
    return {_normalised(name) for name in listed.split(",") if name.strip()}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
