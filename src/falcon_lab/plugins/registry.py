"""The registry of components: finding, checking and building one by its YAML node."""

from __future__ import annotations

import dataclasses
import pkgutil
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from falcon_lab.errors import ConfigError, FalconLabError, did_you_mean, join
from falcon_lab.fields import options
from falcon_lab.plugins.hooks import KINDS, Component

if TYPE_CHECKING:
    from falcon_lab.interfaces import BuildContext


@dataclasses.dataclass(frozen=True)
class Failure:
    """A plug-in that did not load."""

    distribution: str
    version: str
    entry_point: str
    error: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} did not load: {self.error}".replace("  ", " ")


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

        Raises:
            ConfigError: at ``key``, when there is none, or more than one with that bare name.
        """
        of_kind = [c for c in self.components if c.kind == kind]
        found = [c for c in of_kind if name in (c.name, c.full_name)]
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
        component = self.named(kind, node, key)
        config = _config_of(component, node, key)
        values = {} if config is None else _plain(config)
        for name, inner in _nodes(component.config).items():
            values[name] = self.check(inner, values[name], join(key, name))
        return {"name": node["name"], **values}

    def defaults(self, kind: str, name: str) -> dict[str, Any]:
        """Return the options of a component that have a default, with it."""
        return _defaults(self.find(kind, name).config)

    def build(self, kind: str, node: Mapping[str, Any], context: BuildContext) -> Any:
        """Build the component that a YAML node describes.

        Raises:
            FalconLabError: the node is wrong, its module cannot be imported, or the builder
                refused its options with a ``ValueError``.
        """
        component = self.named(kind, node, kind)
        config = _config_of(component, node, kind)
        build = _builder(component)
        try:
            made = build(config, dataclasses.replace(context, components=self))
        except ValueError as error:
            raise FalconLabError(f"{kind} {component.full_name}: {error}") from error
        return _with_defaults(component, made)

    def provide(self, kind: str, part: Any, context: BuildContext) -> Any:
        """Return a component that is there already, or build the one that a node describes."""
        return self.build(kind, part, context) if isinstance(part, Mapping) else part

    def provenance(self, kind: str, node: Mapping[str, Any]) -> dict[str, str]:
        """Return what to write down about a component: name, distribution, version."""
        component = self.named(kind, node, kind)
        return {
            "name": component.name,
            "distribution": component.distribution,
            "version": component.version,
        }

    def listing(self) -> list[dict[str, Any]]:
        """List every component as plain values for JSON."""
        return [
            {
                "kind": component.kind,
                "name": component.name,
                "full_name": component.full_name,
                "distribution": component.distribution,
                "version": component.version,
                "options": _options(component.config),
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


def _config_of(component: Component, node: Mapping[str, Any], key: str) -> Any:
    """Return the component's options as its dataclass (None when it has none)."""
    values = {name: value for name, value in node.items() if name != "name"}
    if component.config is not None:
        return options(component.config, values, key)
    if values:
        problem = f"unknown key; {component.kind} {component.name!r} has no options"
        raise ConfigError(join(key, next(iter(values))), problem)
    return None


def _builder(component: Component) -> Callable[..., Any]:
    if not isinstance(component.build, str):
        return component.build
    try:
        build = pkgutil.resolve_name(component.build)
    except (ImportError, AttributeError) as error:
        raise FalconLabError(
            f"{component.kind} {component.name!r} of {component.distribution} "
            f"{component.version} cannot be imported from {component.build}: {error}"
        ) from error
    assert callable(build)
    return build


def _with_defaults(component: Component, made: Any) -> Any:
    """Give a component that does not derive from its kind's class the defaults of that class.

    Its own attributes, methods and bases come first.

    Raises:
        FalconLabError: it is no object of a class of its own.
    """
    from falcon_lab.interfaces import BASES  # with torch, which listing plug-ins does not import

    base = BASES.get(component.kind)
    if base is None or isinstance(made, base):
        return made
    # A property of the base would hide the instance's own attribute of that name.
    own = frozenset(name for name in getattr(made, "__dict__", ()) if hasattr(base, name))
    try:
        derived = _derived(type(made), base, own)  # type: ignore[arg-type]
        object.__setattr__(made, "__class__", derived)
    except TypeError as error:
        raise FalconLabError(
            f"{component.kind} {component.full_name} is a {type(made).__name__}; derive its class "
            f"from falcon_lab.interfaces.{base.__name__}"
        ) from error
    return made


@cache
def _derived(own: type[Any], base: type[Any], attributes: frozenset[str]) -> type[Any]:
    """Make a class of the same layout that derives from both."""
    names = {"__slots__": (), "__doc__": own.__doc__, "__module__": own.__module__}
    names |= {"__qualname__": own.__qualname__, **dict.fromkeys(attributes)}
    return types.new_class(own.__name__, (own, base), exec_body=lambda body: body.update(names))


def _plain(config: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(config)
    return {field.name: plain[field.name] for field in dataclasses.fields(config) if field.init}


def _nodes(config: type | None) -> dict[str, str]:
    """Return the options that are nodes of other components, and of which kind."""
    fields = () if config is None else dataclasses.fields(config)
    return {f.name: f.metadata["component"] for f in fields if "component" in f.metadata}


def _options(config: type | None) -> dict[str, Any]:
    """Return every option with its default, ``"???"`` where one must be given."""
    fields = () if config is None else dataclasses.fields(config)
    return {field.name: "???" for field in fields if field.init} | _defaults(config)


def _defaults(config: type | None) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for field in () if config is None else dataclasses.fields(config):
        if not field.init:
            continue
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
            nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
            defaults[field.name] = dataclasses.asdict(value) if nested else value
        elif field.default is not dataclasses.MISSING and field.default != "???":
            defaults[field.name] = field.default
    return defaults
