"""What is searched: options of a method's components, and what each may be.

drafter.skip_mlp=1..28        a subset of these whole numbers, where the option is a list
controller.threshold=0.2..0.9 a number, whole where the option is
tree.depth=4,6,8              one of these values
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from falcon_lab.errors import FalconLabError, did_you_mean
from falcon_lab.fields import parse_value
from falcon_lab.plugins.registry import Components

Point = dict[str, Any]
"""Full key of an option, as in ``drafter.skip_mlp`` -> its value."""

LARGEST_SUBSET = 10_000
"""Whole numbers that a subset may be of."""


@dataclass(frozen=True)
class Subset:
    """Some of the whole numbers from ``low`` to ``high``, ascending."""

    low: int
    high: int

    @property
    def numbers(self) -> range:
        """Return those that there are."""
        return range(self.low, self.high + 1)

    def holds(self, value: Any) -> bool:
        """Whether a value is one of these."""
        return isinstance(value, list) and set(value) <= set(self.numbers)

    def draw(self, random: Random) -> list[int]:
        """Draw first how large it is, small ones more often: what is left out is seldom much."""
        count = round(len(self.numbers) * random.random() ** 2)
        return sorted(random.sample(self.numbers, count))

    def beside(self, value: list[int], random: Random) -> list[int]:
        """Return a subset that differs in one number."""
        return sorted({*value} ^ {random.choice(self.numbers)})


@dataclass(frozen=True)
class Interval:
    """A number from ``low`` to ``high``."""

    low: float
    high: float
    whole: bool

    def holds(self, value: Any) -> bool:
        """Whether a value is one of these."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def draw(self, random: Random) -> float:
        """Draw evenly."""
        if self.whole:
            return random.randint(int(self.low), int(self.high))
        return random.uniform(self.low, self.high)

    def beside(self, value: float, random: Random) -> float:
        """Draw another one."""
        return self.draw(random)


@dataclass(frozen=True)
class Choices:
    """One of some values."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        """Whether a value is one of these."""
        return value in self.values

    def draw(self, random: Random) -> Any:
        """Draw evenly."""
        return random.choice(self.values)

    def beside(self, value: Any, random: Random) -> Any:
        """Draw another one."""
        return self.draw(random)


Dimension = Subset | Interval | Choices
Space = Mapping[str, Dimension]
"""Full key of an option -> what it may be."""


def parse_space(
    texts: Sequence[str], nodes: Mapping[str, Mapping[str, Any]], components: Components
) -> dict[str, Dimension]:
    """Return the space that a user wrote.

    Args:
        texts: as in the module's docstring.
        nodes: of the method: ``drafter``, ``tree``, ``acceptance`` and ``controller``.
        components: knows their options.

    Raises:
        FalconLabError: one of them is not understood, or no option of these components.
    """
    if not texts:
        raise FalconLabError("name what is searched: --over drafter.OPTION=LOW..HIGH")
    space: dict[str, Dimension] = {}
    for text in texts:
        key, written, values = text.partition("=")
        if not written:
            raise FalconLabError(f"--over {text}: write KEY=LOW..HIGH or KEY=VALUE,VALUE")
        if key in space:
            raise FalconLabError(f"--over {key}: is given twice; leave one out")
        space[key] = _dimension(key, values, _option(key, nodes, components))
    return space


def _option(key: str, nodes: Mapping[str, Mapping[str, Any]], components: Components) -> Any:
    """Return the type of the option that a key names."""
    section, _, option = key.partition(".")
    if section not in nodes:
        raise FalconLabError(f"--over {key}: begin with one of {', '.join(nodes)}")
    component = components.named(KINDS[section], nodes[section], section)
    hints = typing.get_type_hints(component.config) if component.config is not None else {}
    if option not in hints:
        meant = did_you_mean(option, list(hints), all_of_them=True)
        raise FalconLabError(f"--over {key}: no option of {component.name}{meant}")
    return hints[option]


KINDS = {
    "drafter": "drafter",
    "tree": "tree_builder",
    "acceptance": "acceptance_rule",
    "controller": "controller",
}
"""Section of a method -> the kind of its component."""


def _dimension(key: str, text: str, hint: Any) -> Dimension:
    low, between, high = text.partition("..")
    if not between:
        values = [_value(key, part) for part in text.split(",")]
        if len(values) < 2:
            raise FalconLabError(f"--over {key}: {text!r} leaves nothing to choose")
        return Choices(tuple(values))
    subset, whole = _is_a(hint, list), _is_a(hint, int)
    ends = [_value(key, part) for part in (low, high)]
    numbers = [end for end in ends if type(end) in ((int,) if subset or whole else (int, float))]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or numbers[0] > numbers[1]:
        wanted = "two whole numbers" if subset or whole else "two numbers"
        raise FalconLabError(f"--over {key}: {text!r} must be {wanted}, the lower one first")
    if subset and numbers[1] - numbers[0] >= LARGEST_SUBSET:
        raise FalconLabError(f"--over {key}: {text!r} are more than {LARGEST_SUBSET:,} numbers")
    first, last = numbers
    return Subset(first, last) if subset else Interval(first, last, whole)


def _value(key: str, text: str) -> Any:
    try:
        return parse_value(text)
    except ValueError as error:
        raise FalconLabError(f"--over {key}: {text!r} cannot be read: {error}") from None


def _is_a(hint: Any, wanted: type) -> bool:
    """Whether an option's type is, or may be, this one."""
    parts = (hint, *typing.get_args(hint))
    return any(part is wanted or typing.get_origin(part) is wanted for part in parts) and not (
        wanted is int and _is_a(hint, list)
    )


def merged(
    nodes: Mapping[str, Mapping[str, Any]], point: Point, components: Components
) -> dict[str, dict[str, Any]]:
    """Return a method's nodes with the options of a point, checked.

    Raises:
        ConfigError: a component refuses them.
    """
    changed = {section: dict(node) for section, node in nodes.items()}
    for key, value in point.items():
        section, _, option = key.partition(".")
        changed[section][option] = value
    return {
        section: components.check(KINDS[section], node, section)
        for section, node in changed.items()
    }


def present(space: Space, nodes: Mapping[str, Mapping[str, Any]]) -> Point | None:
    """Return the point that a method is at before the search; None where it is outside."""
    found = {}
    for key, dimension in space.items():
        section, _, option = key.partition(".")
        found[key] = nodes[section].get(option)
        if not dimension.holds(found[key]):
            return None
    return found


def draw(space: Space, random: Random) -> Point:
    """Draw any point."""
    return {key: dimension.draw(random) for key, dimension in space.items()}


def beside(space: Space, point: Point, random: Random) -> Point:
    """Return a point that differs in one option, and there as little as can be."""
    key = random.choice(list(space))
    return {**point, key: space[key].beside(point[key], random)}
