"""The registry of components: finding, checking and building one by its YAML node."""

from __future__ import annotations

import dataclasses
import json
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean, join
from falcon_lab.fields import options, refuse_unusable
from falcon_lab.files import about
from falcon_lab.plugins.completing import completed
from falcon_lab.plugins.foreign import CTRL_C, PluginError, foreign_code, said
from falcon_lab.plugins.hooks import KINDS, Component

if TYPE_CHECKING:
    from falcon_lab.interfaces import (
        BuildContext,
        EngineContext,
        ExportFormat,
        ImportFormat,
        TargetContext,
    )


DEEPEST = 20
"""Components within components."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A plug-in that did not load."""

    distribution: str
    version: str
    entry_point: str
    error: str

    def __str__(self) -> str:
        owner = f"{self.distribution} {self.version}".strip()
        through = f" (entry point {self.entry_point})" if self.entry_point else ""
        return f"{owner} did not load: {self.error}{through}"


class Components:
    """The registry: what is known, by kind and name.

    Attributes:
        components: all of them, the built-in ones first.
        failures: plug-ins that did not load.
    """

    def __init__(
        self, components: Iterable[Component] = (), failures: Iterable[Failure] = ()
    ) -> None:
        self.components, self.failures = tuple(components), tuple(failures)

    def find(self, kind: str, name: str, key: str = "") -> Component:
        """Return the component that a YAML calls ``name`` (bare, or ``distribution/name``).

        A bare name that a built-in component has is the built-in's.

        Raises:
            ConfigError: at ``key``, when there is none, or more than one with that bare name.
        """
        of_kind = [c for c in self.components if c.kind == kind]
        found = [c for c in of_kind if name in (c.name, c.full_name)]
        found = [c for c in found if c.built_in] or found
        if len(found) > 1:
            choices = " or ".join(c.full_name for c in found)
            problem = f"{kind} {name!r} is registered by several plug-ins; write {choices}"
            raise ConfigError(key, problem)
        if not found:
            raise ConfigError(key, self._unknown(kind, name, of_kind))
        return found[0]

    def knows(self, kind: str, name: str) -> bool:
        """Whether some plug-in registered ``name``."""
        return any(c.kind == kind and name in (c.name, c.full_name) for c in self.components)

    def brought(self, kind: str, name: str) -> Component | None:
        """Return what a distribution brings of a kind of files by that name; None: none does.

        Raises:
            ConfigError: several do.
            FalconLabError: the file is not there.
        """
        if not self.knows(kind, name):
            return None
        component = self.find(kind, name)
        with about(component.path, "read"):
            there = component.path.exists()
        if not there:
            raise FalconLabError(
                f"{kind.replace('_', ' ')} {name!r}: {component.path} is missing, which "
                f"{component.owner} should have brought; install {component.distribution} again"
            )
        return component

    def names(self, kind: str) -> list[str]:
        """List what is registered of a kind, each name once."""
        return list(dict.fromkeys(c.name for c in self.components if c.kind == kind))

    def check(self, kind: str, node: Mapping[str, Any], key: str) -> dict[str, Any]:
        """Return a component's YAML node with its defaults filled in.

        A field of its dataclass that holds the node of another component is marked by
        ``metadata={"component": kind}``, and the node is checked with it.

        Raises:
            ConfigError: naming the full key, for a name that is not registered, an unknown option,
            or
                a value that the component's dataclass refuses.
        """
        return self._checked(kind, node, key, DEEPEST)

    def _checked(self, kind: str, node: Mapping[str, Any], key: str, left: int) -> dict[str, Any]:
        component = self.named(kind, node, key)
        if not left:
            raise ConfigError(key, f"components within components never end ({component.owner})")
        values = _values(component, node, key)

        def check(inner: str, value: Any, at: str) -> dict[str, Any]:
            if inner not in KINDS or not isinstance(value, Mapping):
                problem = f"must be a {inner}'s mapping with its name, not {value!r}"
                raise ConfigError(at, f"{problem} ({component.owner})")
            return self._checked(inner, value, at, left - 1)

        return {"name": node["name"], **_with_nodes(component, values, key, check)}

    def owner(self, kind: str, name: str) -> str:
        """Return whose a component is, for messages."""
        return self.find(kind, name).owner

    def defaults(self, kind: str, name: str, key: str = "") -> dict[str, Any]:
        """Return the options of a component that have a default, with it.

        Raises:
            ConfigError: at ``key``, when they cannot be made.
        """
        component = self.find(kind, name, join(key, "name"))
        with _options_of(component, key):
            if component.config is not None and not component.built_in:
                refuse_unusable(component.config, key)
            return _defaults(component)

    def build(
        self,
        kind: str,
        node: Mapping[str, Any],
        context: BuildContext | EngineContext | TargetContext,
    ) -> Any:
        """Build the component that a YAML node describes.

        Raises:
            FalconLabError: the node is wrong, its module cannot be imported, or the builder
                refused its options with a ``ValueError``.
        """
        component = self.named(kind, node, kind)
        with _options_of(component, kind):
            config = _config_of(component, node, kind)
        build = _builder(component)
        with _code_of(component, "building"), _refusals_named(component):
            made = build(config, dataclasses.replace(context, components=self))
            return completed(component, made)

    def provide(self, kind: str, part: Any, context: BuildContext) -> Any:
        """Return a component that is there already, or build the one that a node describes."""
        return self.build(kind, part, context) if isinstance(part, Mapping) else part

    def options(self, kind: str, node: Mapping[str, Any]) -> Any:
        """Return the options of a node as its component's dataclass; None where it has none.

        Raises:
            ConfigError: as ``check``.
        """
        component = self.named(kind, node, kind)
        with _options_of(component, kind):
            return _config_of(component, node, kind)

    def export_format(self, drafter: str, name: str) -> ExportFormat:
        """Return a format in which a kind of drafter can be written for other programs.

        Raises:
            FalconLabError: there is none of that name, or its class cannot be imported.
        """
        component = self.find("drafter", drafter)
        formats = dict(component.exports)
        if name not in formats:
            raise FalconLabError(self._no_export(component, name))
        make = _builder(dataclasses.replace(component, build=formats[name]))
        with _code_of(component, f"making the format {name} of"):
            return cast("ExportFormat", make())

    def import_formats(self) -> Iterator[tuple[str, ImportFormat]]:
        """Yield the drafters that are read where others have trained them, each with its reader.

        Raises:
            FalconLabError: a reader's class cannot be imported.
        """
        for component in self.components:
            if component.imports is not None:
                make = _builder(dataclasses.replace(component, build=component.imports))
                with _code_of(component, "making the import format of"):
                    yield self.called("drafter", component.full_name), cast("ImportFormat", make())

    def _no_export(self, component: Component, name: str) -> str:
        known = {each: None for c in self.components for each, _ in c.exports}
        if name not in known:
            return f"no format named {name!r}{did_you_mean(name, list(known), all_of_them=True)}"
        if own := [each for each, _ in component.exports]:
            listed = ", ".join(own)
            return f"drafter {component.name} cannot be written as {name}; it can be as {listed}"
        return (
            f"drafter {component.name} cannot be written as {name}: no engine hosts one of its "
            "kind; falcon_lab.export.generate runs it inside model.generate of transformers"
        )

    def provenance(self, kind: str, node: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to write down about a component: name, distribution, version.

        The same of components that it is made of stands by the option that has them.
        """
        component = self.named(kind, node, kind)
        inner = {name: node[name] for name in _nodes(component.config) if name in node}
        return {
            "name": component.name,
            "distribution": component.distribution,
            "version": component.version,
            **_with_nodes(
                component, inner, kind, lambda kind, node, at: self.provenance(kind, node)
            ),
        }

    def replaced(
        self,
        kind: str,
        node: Mapping[str, Any],
        change: Callable[[str, dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a node with what ``change`` makes of it and of every node within it."""
        component = self.named(kind, node, kind)

        def within(kind: str, value: Any, at: str) -> dict[str, Any]:
            return self.replaced(kind, value, change)

        return change(kind, _with_nodes(component, node, kind, within))

    def lacks(self, kind: str, node: Mapping[str, Any]) -> bool:
        """Whether a node, or one within it, names a component that no plug-in registered."""
        if not self.knows(kind, str(node.get("name"))):
            return True
        lacking: list[bool] = []

        def within(kind: str, value: Any, at: str) -> None:
            lacking.append(isinstance(value, Mapping) and self.lacks(kind, value))

        _with_nodes(self.find(kind, str(node["name"])), node, kind, within)
        return any(lacking)

    def recorded(
        self, kind: str, node: Mapping[str, Any], provenance: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a node that was written down, by the name that its component has here.

        Args:
            kind: of the component.
            node: as it was written down.
            provenance: of ``provenance``, written down with it; empty where nothing is known.

        Raises:
            ConfigError: the component of that distribution is not here, and what has its name is
                another's.
        """
        name, origin = str(node.get("name")), provenance.get("distribution")
        bare = name.rpartition("/")[2]
        if not origin or not self.knows(kind, name):
            return dict(node)
        if self.knows(kind, f"{origin}/{bare}"):
            return {**node, "name": self.called(kind, f"{origin}/{bare}")}
        problem = (
            f"{bare!r} of {origin} {provenance.get('version', '')} is not installed, and what is "
            f"called so here is another's ({self.find(kind, name).owner}); install {origin}, or "
            "write its new name into 'provenance'"
        )
        raise ConfigError(join(kind, "name"), problem)

    def called(self, kind: str, full_name: str) -> str:
        """Return the shortest name by which a YAML reaches a component."""
        component = self.find(kind, full_name)
        bare = [c for c in self.components if (c.kind, c.name) == (kind, component.name)]
        return component.name if component.built_in or len(bare) == 1 else full_name

    def usable(self) -> Components:
        """Return the registry without the plug-ins' components whose options cannot be made.

        They are among its failures. Nothing else asks for the options of all components.
        """
        usable, failures = [], list(self.failures)
        for component in self.components:
            try:
                _options(component)
                usable.append(component)
            except FalconLabError as error:
                reason = error.reason if isinstance(error, PluginError) else str(error)
                origin = component.distribution, component.version, component.entry_point
                problem = f"{component.kind} {component.name!r}: {reason}"
                failures.append(Failure(*origin, problem))
        return Components(usable, failures)

    def listing(self) -> list[dict[str, Any]]:
        """List every component as plain values for JSON."""
        return [
            {
                "kind": component.kind,
                "name": component.name,
                "full_name": component.full_name,
                "distribution": component.distribution,
                "version": component.version,
                "options": _options(component),
            }
            for component in sorted(self.components, key=lambda c: KINDS.index(c.kind))
        ]

    def named(self, kind: str, node: Mapping[str, Any], key: str) -> Component:
        """Return the component of a YAML node.

        Raises:
            ConfigError: the node has no name, or one that ``find`` refuses.
        """
        name = node.get("name")
        if not isinstance(name, str):
            said = "is missing" if name is None else f"must be a name, not {name!r}"
            raise ConfigError(join(key, "name"), f"{said}; known: {', '.join(self.names(kind))}")
        return self.find(kind, name, join(key, "name"))

    def _unknown(self, kind: str, name: str, of_kind: list[Component]) -> str:
        known = [component.name for component in of_kind]
        problem = f"no {kind} named {name!r}{did_you_mean(name, known, all_of_them=True)}"
        return "; ".join([problem, *map(str, self.failures)])


# --- one component ------------------------------------------------------------------------------


@contextmanager
def _code_of(component: Component, doing: str, *, slow: str = "") -> Iterator[None]:
    """Run a component's own code inside; a bug of a built-in one stays as it is.

    Raises:
        PluginError: what a plug-in's code raises.
    """
    if component.built_in:
        yield
        return
    doing = f"{doing} {component.kind} {component.name!r}"
    with foreign_code(component.owner, doing, slow=slow):
        yield


@contextmanager
def _options_of(component: Component, key: str) -> Iterator[None]:
    """Run the code of a component's options inside.

    Raises:
        ConfigError: what is wrong with them, at ``key``, and whose they are where they say so.
    """
    try:
        with _code_of(component, "making the options of", slow=CTRL_C):
            yield
    except PluginError as error:
        raise ConfigError(key, str(error)) from error.__cause__
    except ConfigError as error:
        if component.built_in or error.__cause__ is None:
            raise
        problem = f"{error.problem} (said by {component.owner})"
        raise ConfigError(error.key, problem, error.source) from error.__cause__


@contextmanager
def _refusals_named(component: Component) -> Iterator[None]:
    """Name the component in what its builder refuses.

    Raises:
        FalconLabError: for its ``ValueError``, and for a plug-in's ``FalconLabError``.
    """
    try:
        yield
    except (ValueError, FalconLabError) as error:
        ours = isinstance(error, FalconLabError)
        if ours and (component.built_in or component.full_name in str(error)):
            raise
        reason = str(error) if isinstance(error, FalconLabError) else said(error)
        problem = reason.removeprefix("ValueError: ")
        raise FalconLabError(f"{component.kind} {component.full_name}: {problem}") from error


def _config_of(component: Component, node: Mapping[str, Any], key: str) -> Any:
    """Return the component's options as its dataclass (None when it has none)."""
    values = {name: value for name, value in node.items() if name != "name"}
    if component.config is not None:
        return options(component.config, values, key)
    if values:
        problem = f"unknown key; {component.kind} {component.name!r} has no options"
        raise ConfigError(join(key, next(iter(values))), problem)
    return None


def _values(component: Component, node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the checked options of a component's node, defaults among them."""
    with _options_of(component, key):
        config = _config_of(component, node, key)
        if config is None:
            return {}
        _refuse_name(component, key)
        plain = dataclasses.asdict(config)
        return {field.name: plain[field.name] for field in _fields(component)}


def _builder(component: Component) -> Callable[..., Any]:
    """Return the builder, imported where it is named by a string.

    Raises:
        FalconLabError: it is not there, or cannot be called.
    """
    named = component.build
    if isinstance(named, Path):
        raise TypeError(f"{component.kind} {component.name!r} is a file, which nobody builds")
    if not isinstance(named, str):
        return named
    what = f"{component.kind} {component.name!r} of {component.owner}"
    with _code_of(component, "importing the builder of", slow=CTRL_C):
        try:
            build = pkgutil.resolve_name(named)
        except (ImportError, AttributeError, ValueError) as error:
            raise FalconLabError(
                f"{what} cannot be imported from {named}: {said(error)}"
            ) from error
        if not callable(build):
            raise FalconLabError(f"{what}: {named} is a {type(build).__name__}, and no builder")
    return build


# --- its options --------------------------------------------------------------------------------


def _fields(component: Component) -> list[dataclasses.Field[Any]]:
    """Return the fields of a component's options that a YAML can set."""
    if component.config is None:
        return []
    return [field for field in dataclasses.fields(component.config) if field.init]


def _nodes(config: type | None) -> dict[str, str]:
    """Return the options that are nodes of other components, and of which kind."""
    fields = () if config is None else dataclasses.fields(config)
    return {f.name: f.metadata["component"] for f in fields if "component" in f.metadata}


def _with_nodes(
    component: Component,
    values: Mapping[str, Any],
    key: str,
    change: Callable[[str, Any, str], Any],
) -> dict[str, Any]:
    """Return a component's options with its nodes, or those in its lists, changed.

    Args:
        component: whose.
        values: the options, all of them or some.
        key: of the component.
        change: kind, node and its full key -> what takes its place.
    """
    changed = dict(values)
    for name, kind in _nodes(component.config).items():
        at, value = join(key, name), values.get(name)
        if isinstance(value, list):
            changed[name] = [change(kind, v, f"{at}[{i}]") for i, v in enumerate(value)]
        elif name in values:
            changed[name] = change(kind, value, at)
    return changed


def _options(component: Component) -> dict[str, Any]:
    """Return every option with its default, ``"???"`` where one must be given.

    Raises:
        FalconLabError: a plug-in's cannot be made or shown.
    """
    with _code_of(component, "making the options of", slow=CTRL_C):
        if component.config is not None and not component.built_in:
            refuse_unusable(component.config)
            _refuse_name(component, "")
        shown = {field.name: "???" for field in _fields(component)} | _defaults(component)
        json.dumps(shown, default=str)
        return shown


def _defaults(component: Component) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for field in _fields(component):
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
            defaults[field.name] = dataclasses.asdict(value) if nested else value
        elif field.default is not dataclasses.MISSING and field.default != "???":
            defaults[field.name] = field.default
    return defaults


def _refuse_name(component: Component, key: str) -> None:
    """Refuse an option that would take the place of the component's own name.

    Raises:
        ConfigError: the dataclass has one.
    """
    if any(field.name == "name" for field in _fields(component)):
        problem = f"is the component's own key, and no option can be called so ({component.owner})"
        raise ConfigError(join(key, "name"), problem)
