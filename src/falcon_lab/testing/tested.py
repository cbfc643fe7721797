"""The component under test, and the error that says what it does not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from falcon_lab.errors import FalconLabError
from falcon_lab.interfaces import BuildContext, EngineContext, TargetContext
from falcon_lab.plugins.completing import IncompleteError
from falcon_lab.plugins.discovery import load_components
from falcon_lab.plugins.hooks import Component
from falcon_lab.plugins.registry import Components

Recipe = Mapping[str, Any] | Callable[[Any], Any]
"""A YAML node ``{name: …}`` of a registered component, or what builds one from a ``BuildContext``
(a target from a ``TargetContext``, an engine from an ``EngineContext``)."""


class ContractError(FalconLabError, AssertionError):
    """A component does not do what its kind requires."""


def expect(holds: object, what: str, *, expected: Any, found: Any, fix: str) -> None:
    """Raise unless something holds, as ``ComponentUnderTest.expect`` does."""
    if not bool(holds):
        raise ContractError(f"{what}: expected {expected}, found {found}; {fix}")


class ComponentUnderTest:
    """A component under test.

    Args:
        kind: one of ``plugins.hooks.KINDS``.
        recipe: how it is built.
        seed: of its weights, and of whatever a check draws.
    """

    def __init__(self, kind: str, recipe: Recipe, seed: int = 0) -> None:
        self.kind, self.recipe, self.seed = kind, recipe, seed
        self.components = load_components()
        self.name = (
            str(recipe.get("name"))
            if isinstance(recipe, Mapping)
            else getattr(recipe, "__qualname__", repr(recipe))
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    def build(self, context: BuildContext | EngineContext | TargetContext) -> Any:
        """Build the component, with the same random weights every time.

        Raises:
            ContractError: what was built is none of its kind.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            components, node = self.registered()
            try:
                return components.build(self.kind, node, context)
            except IncompleteError as error:
                raise ContractError(f"{error}; derive its class from that one") from error

    def registered(self) -> tuple[Components, dict[str, Any]]:
        """Return a registry that knows the component, and its node there."""
        if isinstance(self.recipe, Mapping):
            return self.components, dict(self.recipe)
        recipe = self.recipe

        def build(config: None, context: BuildContext | EngineContext | TargetContext) -> Any:
            return self._from_recipe(recipe, context)  # with other random weights each time

        component = Component(self.kind, "tested", build, None, "falcon-lab", "0")
        return Components([component]), {"name": "tested"}

    def _from_recipe(
        self,
        recipe: Callable[[Any], Any],
        context: BuildContext | EngineContext | TargetContext,
    ) -> Any:
        return recipe(replace(context, components=self.components))

    def expect(self, holds: object, what: str, *, expected: Any, found: Any, fix: str) -> None:
        """Raise unless it holds.

        Args:
            holds: whether.
            what: that was looked at.
            expected: of it.
            found: instead.
            fix: what the author can do.

        Raises:
            ContractError: it does not.
        """
        expect(holds, f"{self}: {what}", expected=expected, found=found, fix=fix)

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Note in any other error what was being checked."""
        try:
            yield
        except ContractError:
            raise
        except Exception as error:
            error.add_note(f"falcon_lab.testing: {self}, checking {what}")
            raise

    def generator(self, number: int = 0) -> torch.Generator:
        """Make a generator of its own for each ``number``."""
        return torch.Generator().manual_seed(1000 * self.seed + number)
