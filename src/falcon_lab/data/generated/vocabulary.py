"""What the definitions of a generated module share: words, theme, names, randomness."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return text.split()


NOUNS = words(
    """
    order ticket sensor invoice planet rocket garden window camera bottle letter packet account
    record signal channel server market river forest engine bridge player course lesson recipe
    branch worker vehicle parcel region device message project meeting booking painting village
    product station
    """
)
"""Things; every plural ends in s."""

ATTRIBUTES = words(
    """
    price weight height width length score speed level depth amount volume rank size age rate
    cost energy power distance pressure salary balance budget margin radius delay offset
    capacity priority version duration degree charge reward
    """
)
"""Whole-number properties of a thing."""

COLOURS = ("red", "blue", "green", "black", "white", "yellow", "orange", "purple")
KINDS = ("small", "large", "open", "closed", "new", "old", "active", "hidden", "local", "remote")
PEOPLE = ("ada", "alan", "grace", "edsger", "barbara", "donald", "frances", "john")


def plural(word: str) -> str:
    """Return the plural of a noun or an attribute: ``capacity`` -> ``capacities``."""
    return word[:-1] + "ies" if word.endswith("ty") else word + "s"


T = TypeVar("T")
_GROWING = ("imports", "names", "constants", "examples", "shapes")


class Draw:
    """Seeded choices that come out alike on every Python version and platform.

    Built on ``Random.random`` alone, the one method whose sequence Python guarantees.
    """

    def __init__(self, seed: int) -> None:
        # Random's own seeding lets small whole numbers collide (2 and 2 + 2**32, for one).
        digest = hashlib.sha256(str(seed).encode()).digest()
        self._random = Random(int.from_bytes(digest, "big")).random

    def pick(self, options: Sequence[T]) -> T:
        """Return one of ``options``."""
        return options[int(self._random() * len(options))]

    def number(self, low: int, high: int) -> int:
        """Return a whole number in [low, high]."""
        return low + int(self._random() * (high - low + 1))

    def chance(self, probability: float) -> bool:
        """Return True with ``probability``."""
        return self._random() < probability

    def several(self, options: Sequence[T], count: int) -> list[T]:
        """Return ``count`` different ones of ``options``, in random order."""
        left = list(options)
        return [left.pop(int(self._random() * len(left))) for _ in range(count)]

    def numbers(self, count: int = 3, high: int = 9) -> list[int]:
        """Return ``count`` whole numbers in [1, high]."""
        return [self.number(1, high) for _ in range(count)]


class Unfit(Exception):
    """A template that cannot be used at this place of this module."""


Drawn = Callable[[Draw], tuple[str, object]]
"""Draws the text of a function's arguments, and the value that it returns for them."""


@dataclass(frozen=True, slots=True)
class Example:
    """A function that tests and programs of the module may call.

    Attributes:
        name: of the function.
        draw: draws the text of its arguments and the value that it returns for them.
        numbers: whether one list of whole numbers is all that it must be given.
    """

    name: str
    draw: Drawn
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """A class that tests may use: its attributes and a method that adds to one of them."""

    name: str
    attributes: tuple[str, ...]
    adder: str
    target: str


@dataclass
class Scope:
    """The state of one module while it is written."""

    draw: Draw
    noun: str = ""
    attributes: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    constants: list[tuple[str, int]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.noun = self.draw.pick(NOUNS)
        self.attributes = self.draw.several(ATTRIBUTES, 3)

    @property
    def title(self) -> str:
        """Return the noun as a class name."""
        return self.noun.capitalize()

    def snapshot(self) -> dict[str, int]:
        """Return the sizes of all that a definition may add to, so that it can be undone."""
        return {name: len(getattr(self, name)) for name in _GROWING}

    def restore(self, sizes: dict[str, int]) -> None:
        """Forget what was added since ``snapshot``."""
        for name, size in sizes.items():
            del getattr(self, name)[size:]

    def attribute(self) -> str:
        """Return one of the module's three attributes."""
        return self.draw.pick(self.attributes)

    def claim(self, name: str) -> None:
        """Reserve ``name`` for a definition.

        Raises:
            Unfit: another definition has it.
        """
        if name in self.names:
            raise Unfit
        self.names.append(name)

    def example(self, name: str, *, numbers: bool = False) -> Callable[[Drawn], None]:
        """Register a function that draws arguments and the result of the definition ``name``.

        Args:
            name: of the function that tests and programs of the module may call.
            numbers: whether one list of whole numbers is all that it must be given.
        """
        return lambda draw: self.examples.append(Example(name, draw, numbers))

    def need(self, statement: str) -> None:
        """Import what a definition uses, unless it is imported already."""
        if statement not in self.imports:
            self.imports.append(statement)

    def default(self) -> tuple[str, int]:
        """Return text and value of a default: a constant of the module, or a literal."""
        if self.constants and self.draw.chance(0.7):
            return self.draw.pick(self.constants)
        value = self.draw.number(2, 9)
        return str(value), value


def function(name: str, parameters: str, returns: str, doc: str, *body: str) -> str:
    """Return the text of a function with a one-line docstring (left out when empty)."""
    lines = [f'"""{doc}"""', *body] if doc else list(body)
    return "\n".join([f"def {name}({parameters}) -> {returns}:", *("    " + x for x in lines)])
