"""A seeded generator of small, varied, valid Python modules: the built-in corpus.

Library sources teach a model of this size to babble within the minutes that a CPU has; these
modules are narrow enough to learn and varied enough not to loop. Each has a theme (a noun and
three attributes), so that its names recur, and its tests assert what its functions really return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from falcon_lab.data.generated import classes, numbers, programs, tables
from falcon_lab.data.generated.vocabulary import Draw, Scope, Unfit
from falcon_lab.errors import FalconLabError

SPLITS = ("train", "validation", "heldout")
SHORTEST = 350
"""Characters of definitions below which a module continues past the count it drew."""
LONGEST = 880
"""Characters that no module's definitions exceed."""
_RANGE = 2**32
"""Seeds of one split of one corpus seed."""

Template = Callable[[Scope], str]
_CLOSING: tuple[Template, ...] = tuple(
    template
    for template in (numbers.check, tables.describe, numbers.total, numbers.clamp, tables.pair)
    for _ in range(2)
)
"""Short ones that end a module whose first choices did not fit."""


def module_seed(split: str, index: int, seed: int = 0) -> int:
    """Return the seed of document ``index`` of a split; no two (split, index, seed) share one."""
    if not 0 <= index < _RANGE:
        raise ValueError(f"a split has {_RANGE} documents, and no number {index}")
    return (seed * len(SPLITS) + SPLITS.index(split)) * _RANGE + index


def generate_modules(split: str, count: int, seed: int = 0) -> Iterator[str]:
    """Yield the first ``count`` modules of a split.

    Raises:
        FalconLabError: ``split`` is none of ``SPLITS`` or ``seed`` is negative.
    """
    if split not in SPLITS:
        raise FalconLabError(f"no split {split!r}; choose one of {', '.join(SPLITS)}")
    if seed < 0:
        raise FalconLabError(f"the seed of the generated corpus must not be negative, got {seed}")
    for index in range(count):
        yield generate_module(module_seed(split, index, seed))


def generate_module(seed: int) -> str:
    """Write one module of 3 to 7 definitions in about 300 to 900 characters.

    The same seed gives the same text on every Python version and platform.
    """
    scope = Scope(Draw(seed))
    parts: list[str] = []
    wanted = scope.draw.number(3, 7)
    length = scope.draw.number(400, 800)
    for template in _plan(scope.draw, wanted):
        used = sum(len(part) + 3 for part in parts)
        if len(parts) >= 3 and (used > length or (used > SHORTEST and len(parts) >= wanted)):
            break
        text = _attempt(template, scope, LONGEST - used)
        if text is not None:
            parts.append(text)
    imports = "\n".join(sorted(scope.imports, key=lambda line: (line.startswith("from"), line)))
    return "\n\n\n".join([imports, *parts] if imports else parts) + "\n"


def _plan(draw: Draw, wanted: int) -> list[Template]:
    """Choose templates in the order of a module: constants, bodies, then tests and a program."""
    bodies: list[Template] = []
    for _ in range(wanted):
        family = draw.pick((numbers, numbers, numbers, tables, tables, programs, classes, classes))
        bodies.append(draw.pick(family.TEMPLATES))
    head = [draw.pick(tables.CONSTANTS)] if draw.chance(0.55) else []
    # Tests stand between the definitions too, so that few of them fall to the length limit.
    for position in draw.several(range(1, 5), 2):
        bodies.insert(position, draw.pick(programs.ENDINGS))
    return [*head, *bodies, draw.pick(programs.ENDINGS), *_CLOSING]


def _attempt(template: Template, scope: Scope, room: int) -> str | None:
    """Return the template's text, or None and leave the scope as it was where it does not fit."""
    before = scope.snapshot()
    with suppress(Unfit):
        text = template(scope)
        if len(text) <= room:
            return text
    scope.restore(before)
    return None
