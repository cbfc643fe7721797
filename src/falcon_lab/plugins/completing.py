"""Sees that what a builder gave is a component, and gives it what its kind has by default.

A component need not derive from the class of its kind (``falcon_lab.interfaces``); one that does
not is given that class's defaults here, before anything else sees it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.foreign import shown
from falcon_lab.plugins.hooks import Component

RENAMED = {
    "probe": "auxiliary_nodes",
    "harvest": "observe_auxiliary",
    "max_probes": "max_auxiliary",
    "kv_held": "kv_allocated",
}
"""What members of a drafter were called before."""
TELLING = {"harvest", "max_probes", "kv_held"}
"""Those that a drafter of today has no other use for."""

SIZES = {"block": 1, "max_depth": 0, "max_nodes": 0, "max_auxiliary": 0}
"""Members that are numbers -> the least that they may be."""


class IncompleteError(FalconLabError):
    """What a builder gave is no component of its kind."""


def completed(component: Component, made: Any) -> Any:
    """Return what a component's builder gave, with the defaults of its kind where it has none.

    Raises:
        IncompleteError: it is none of the kind, or lacks something that has no default.
    """
    from falcon_lab import interfaces  # with torch, which listing plug-ins does not import

    what = f"{component.kind} {component.full_name}"
    if component.kind not in interfaces.BASES:
        if component.kind == "template" and not isinstance(made, Mapping | Sequence):
            found = type(made).__name__
            raise IncompleteError(
                f"{what} is a {found}; its builder must return a mapping from node to child count, "
                f"or a list of nodes ({component.owner})"
            )
        return made
    base: type[Any] = getattr(interfaces, interfaces.BASES[component.kind])
    if not isinstance(made, base):
        _refuse_old_names(component, made, base)
        made = _with_defaults(component, made, base)
    missing = [name for name in base.__annotations__ if not hasattr(made, name)]
    if missing := [*sorted(type(made).__abstractmethods__), *missing]:
        raise IncompleteError(
            f"{what} is a {type(made).__name__} without {', '.join(missing)}, which "
            f"falcon_lab.interfaces.{base.__name__} asks for ({component.owner})"
        )
    _refuse_wrong_members(component, made, base)
    return made


def _refuse_wrong_members(component: Component, made: Any, base: type[Any]) -> None:
    """Raise where methods cannot be called, or sizes are none, before decoding meets them."""
    wrong = [name for name in base.__abstractmethods__ if not callable(getattr(made, name))]
    sizes = [name for name in SIZES if hasattr(base, name) or name in base.__annotations__]
    wrong += [name for name in sizes if not _is_size(getattr(made, name), SIZES[name])]
    if wrong:
        found = ", ".join(f"{name}={shown(repr(getattr(made, name)))}" for name in sorted(wrong))
        raise IncompleteError(
            f"{component.kind} {component.full_name} has {found}, which is nothing that "
            f"falcon_lab.interfaces.{base.__name__} can have ({component.owner})"
        )


def _is_size(value: Any, least: int) -> bool:
    try:
        return bool(value >= least)
    except (TypeError, ValueError, RuntimeError):  # no number at all
        return False


def _refuse_old_names(component: Component, made: Any, base: type[Any]) -> None:
    """Raise where defaults would silently take the place of members with an old name."""
    old = [name for name in RENAMED if hasattr(made, name) and not hasattr(made, RENAMED[name])]
    if component.kind == "drafter" and TELLING & {*old}:
        renamed = ", ".join(f"{name} is {RENAMED[name]} now" for name in old)
        raise IncompleteError(
            f"drafter {component.full_name} is written for an earlier falcon-lab: {renamed}; "
            f"rename them, or install a {component.distribution} later than {component.version}"
        )


def _with_defaults(component: Component, made: Any, base: type[Any]) -> Any:
    """Give a component that does not derive from its kind's class the defaults of that class.

    Its own attributes, methods and bases come first.

    Raises:
        IncompleteError: it is no object of a class of its own.
    """
    if isinstance(made, type):  # a class of classes would take part in every later isinstance
        raise IncompleteError(
            f"{component.kind} {component.full_name} is the class {made.__name__} itself; its "
            f"builder must return an object ({component.owner})"
        )
    # A property of the base would hide the instance's own attribute of that name.
    own = frozenset(name for name in getattr(made, "__dict__", ()) if hasattr(base, name))
    try:
        object.__setattr__(made, "__class__", _derived(type(made), base, own))  # type: ignore[arg-type]
    except TypeError as error:
        raise IncompleteError(
            f"{component.kind} {component.full_name} is a {type(made).__name__}; derive its class "
            f"from falcon_lab.interfaces.{base.__name__} ({component.owner})"
        ) from error
    return made


@cache
def _derived(own: type[Any], base: type[Any], attributes: frozenset[str]) -> type[Any]:
    """Make a class of the same layout that derives from both."""
    names = {"__slots__": (), "__doc__": own.__doc__, "__module__": own.__module__}
    names |= {"__qualname__": own.__qualname__, **dict.fromkeys(attributes)}
    return types.new_class(own.__name__, (own, base), exec_body=lambda body: body.update(names))
