"""Whose code raised an error that nobody has caught, by the frames that it went through.

A component's methods are called from everywhere, and none of these calls is guarded; where an error
ends a command, its traceback tells which plug-in took part in it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

from falcon_lab.errors import FalconLabError
from falcon_lab.plugins.discovery import PlugIn, installed
from falcon_lab.plugins.foreign import ends_from_outside, said
from falcon_lab.plugins.hooks import PROJECT, Component

Definition = tuple[str, str]
"""Module and qualified name of a class or a function."""


def blame(error: BaseException) -> str | None:
    """Return in a line whose code raised an error, or over whose objects it was raised.

    The innermost frame of a plug-in's package decides; where there is none, the innermost one that
    has an object of such a package.

    Returns:
        None where no plug-in took part, or the error ends the command from outside.
    """
    packages = {} if ends_from_outside(error) else _packages()
    if not packages:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    for frame in frames:
        if plug_in := packages.get(_package(_module(frame))):
            met = [each for frame in frames for each in _definitions(frame)]
            return f"{said(error)}: raised inside {_named(plug_in, met)}, in {_place(frame)}"
    if isinstance(error, KeyboardInterrupt | OSError | SystemExit):
        return None  # of the disk, or of whoever left: that is nobody's bug
    for frame in frames:
        for value in _objects(frame):
            if plug_in := packages.get(_package(type(value).__module__)):
                met = _classes(value)
                return f"{said(error)}: raised over {_named(plug_in, met)}, in {_place(frame)}"
    return None


def speaker(error: FalconLabError) -> str | None:
    """Return whose own word to the user an error is; None where it is ours."""
    first = error
    while isinstance(first.__cause__, FalconLabError):  # we put the method's name before it
        first = first.__cause__
    *_, (frame, _) = traceback.walk_tb(first.__traceback__)
    plug_in = _packages().get(_package(_module(frame)))
    return _named(plug_in, list(_definitions(frame))) if plug_in else None


def _packages() -> Mapping[str, PlugIn]:
    """Return the import packages of plug-ins: those of their entry points, and all they bring."""
    packages = {}
    for plug_in in installed()[0]:
        point = plug_in.entry_point
        with suppress(AttributeError, OSError, ValueError):  # its metadata are damaged
            packages[_package(point.module)] = plug_in
            files = [file.parts[0] for file in (point.dist and point.dist.files) or ()]
            packages |= {name.removesuffix(".py"): plug_in for name in files if "-" not in name}
    for name in (*sys.stdlib_module_names, PROJECT):  # whatever an entry point may name
        packages.pop(name, None)
    return packages


def _package(module: object) -> str:
    return str(module).partition(".")[0]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def _objects(frame: FrameType) -> Iterator[Any]:
    """Yield what a frame works on: its variables, and what its own object consists of."""
    yield from frame.f_locals.values()
    yield from getattr(frame.f_locals.get("self"), "__dict__", {}).values()


def _definitions(frame: FrameType) -> Iterator[Definition]:
    """Yield the function of a frame, and the classes of the object that it is a method of."""
    yield _module(frame), frame.f_code.co_qualname
    if "self" in frame.f_locals:
        yield from _classes(frame.f_locals["self"])


def _classes(value: Any) -> list[Definition]:
    return [(each.__module__, each.__qualname__) for each in type(value).__mro__]


def _named(plug_in: PlugIn, met: Sequence[Definition]) -> str:
    """Return the component that was met first, and whose it is."""
    components: list[Component] = []
    with suppress(FalconLabError):
        components = plug_in.components()  # it is imported already
    builders = {_builder(component): component for component in components}
    found = [builders[each] for each in met if each in builders]
    if not found and len(components) == 1:
        found = components
    return f"{found[0].kind} {found[0].name!r} of {plug_in.owner}" if found else plug_in.owner


def _builder(component: Component) -> Definition:
    if isinstance(component.build, str):
        module, _, name = component.build.partition(":")
        return module, name
    return getattr(component.build, "__module__", ""), getattr(component.build, "__qualname__", "")
