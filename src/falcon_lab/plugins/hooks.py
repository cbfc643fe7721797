"""The plug-in API: one hook.

A plug-in is an installed distribution with an entry point in the group ``falcon_lab`` that names
a module, and in that module::

    from falcon_lab import hookimpl

    @hookimpl
    def register_components(register):
        register.drafter("medusa", "my_package.medusa:build", config=MedusaConfig)

``falcon_lab.interfaces`` says what a built component must do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pluggy

PROJECT = "falcon_lab"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Builder = Callable[..., Any] | str
"""``build(config, context: BuildContext)``, or ``"package.module:name"`` of it, imported when the
component is first built (so that listing plug-ins imports no torch)."""


class Register(Protocol):
    """What the hook is given: one method per kind of component.

    ``name`` is what a YAML says; ``config`` is the dataclass of the component's other keys (None:
    it has none). A new kind of component adds a method here, never a hook.
    """

    def drafter(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """A ``Drafter``, or a ``TrainableDrafter``."""

    def schedule(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """A ``GlancingSchedule``."""

    def tree_builder(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """A ``TreeBuilder``."""

    def template(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """A tree that the builder ``static`` can be told by name.

        Built, it is what a YAML may write out: a mapping from node to child count, or a list of
        nodes.
        """

    def acceptance_rule(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """An ``AcceptanceRule``."""

    def controller(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """A ``LengthController``."""

    def objective(self, name: str, build: Builder, *, config: type | None = None) -> None:
        """An ``Objective``."""


@hookspec
def register_components(register: Register) -> None:
    """Add components: call ``register.<kind>(name, build, config=Dataclass)`` once for each."""
