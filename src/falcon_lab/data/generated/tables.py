"""Tables, constants, and functions over rows and names."""

from __future__ import annotations

from falcon_lab.data.generated.vocabulary import (
    COLOURS,
    KINDS,
    PEOPLE,
    Draw,
    Scope,
    function,
    plural,
)

ROWS = "list[dict[str, int]]"


def quoted(words: list[str]) -> str:
    """Return words as the inside of a tuple display, in double quotes."""
    return ", ".join(f'"{word}"' for word in words)


def constant(scope: Scope) -> str:
    """Write a number that later definitions may take as their default."""
    draw, attribute = scope.draw, scope.attribute()
    name = f"{draw.pick(('DEFAULT', 'MAX', 'MIN', 'BASE'))}_{attribute.upper()}"
    scope.claim(name)
    value = draw.number(2, 9)
    scope.constants.append((name, value))
    return f"{name} = {value}"


def kinds(scope: Scope) -> str:
    """Write a tuple of words and the function that looks into it."""
    draw, noun = scope.draw, scope.noun
    constant = f"{noun.upper()}_{draw.pick(('KINDS', 'STATES'))}"
    scope.claim(constant)
    words = draw.several(KINDS, draw.number(3, 4))
    name = f"is_{noun}_{'kind' if constant.endswith('KINDS') else 'state'}"
    scope.names.append(name)

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        word = inner.pick(words) if inner.chance(0.6) else inner.pick(KINDS)
        return f'"{word}"', word in words

    doc = f"Tell whether a {noun} can be of this kind."
    body = function(name, "word: str", "bool", doc, f"return word in {constant}")
    return f"{constant} = ({quoted(words)})\n\n\n{body}"


def table(scope: Scope) -> str:
    """Write a table of numbers and the function that reads it."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    constant, name = items.upper(), f"{attribute}_of"
    scope.claim(constant)
    scope.claim(name)
    entries = {word: draw.number(1, 9) for word in draw.several(COLOURS, draw.number(2, 4))}
    missing = draw.number(0, 1)
    colours = list(entries)
    body = (
        [f"return {constant}.get(colour, {missing})"]
        if draw.chance(0.5)
        else [f"if colour in {constant}:", f"    return {constant}[colour]", f"return {missing}"]
    )

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        colour = inner.pick(colours)
        return f'"{colour}"', entries[colour]

    cells = ", ".join(f'"{word}": {number}' for word, number in entries.items())
    doc = f"Look up the {attribute} of a {scope.noun} by its colour."
    text = function(name, "colour: str", "int", doc, *body)
    return f"{constant} = {{{cells}}}\n\n\n{text}"


def sort(scope: Scope) -> str:
    """Write a function that sorts rows by a key."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(scope.noun)
    name = f"{draw.pick(('sort', 'order', 'rank'))}_{items}_by_{attribute}"
    scope.claim(name)
    down = draw.chance(0.4)
    key = f'key=lambda {scope.noun}: {scope.noun}["{attribute}"]'
    body = (
        [f"return sorted({items}, {key}{', reverse=True' if down else ''})"]
        if draw.chance(0.6)
        else [
            f"result = list({items})",
            f"result.sort({key}{', reverse=True' if down else ''})",
            "return result",
        ]
    )
    doc = f"Return the {items} by {attribute}, {'highest' if down else 'lowest'} first."
    return function(name, f"{items}: {ROWS}", ROWS, doc, *body)


def rows_total(scope: Scope) -> str:
    """Write a reduction over rows."""
    draw, noun, attribute = scope.draw, scope.noun, scope.attribute()
    items = plural(noun)
    name = f"total_{attribute}"
    scope.claim(name)
    body = (
        [f'return sum({noun}["{attribute}"] for {noun} in {items})']
        if draw.chance(0.5)
        else [
            "result = 0",
            f"for {noun} in {items}:",
            f'    result += {noun}["{attribute}"]',
            "return result",
        ]
    )

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        numbers = inner.numbers(2)
        rows = ", ".join(f'{{"{attribute}": {number}}}' for number in numbers)
        return f"[{rows}]", sum(numbers)

    doc = f"Return the total {attribute} of the {items}."
    return function(name, f"{items}: {ROWS}", "int", doc, *body)


def index(scope: Scope) -> str:
    """Write a function that maps rows by a key: a dict comprehension, or groups in a loop."""
    draw, noun, attribute = scope.draw, scope.noun, scope.attribute()
    items, group = plural(noun), draw.chance(0.5)
    name = f"{'group' if group else 'index'}_{items}_by_{attribute}"
    scope.claim(name)
    if group:
        returns, doc = f"dict[int, {ROWS}]", f"Group the {items} that have the same {attribute}."
        body = [
            f"groups: {returns} = {{}}",
            f"for {noun} in {items}:",
            f'    groups.setdefault({noun}["{attribute}"], []).append({noun})',
            "return groups",
        ]
    else:
        returns, doc = "dict[int, dict[str, int]]", f"Map each {attribute} to its {noun}."
        body = [f'return {{{noun}["{attribute}"]: {noun} for {noun} in {items}}}']
    return function(name, f"{items}: {ROWS}", returns, doc, *body)


def merge(scope: Scope) -> str:
    """Write a function that merges two tables."""
    draw = scope.draw
    items = plural(scope.attribute())
    name = f"{draw.pick(('merge', 'join'))}_{items}"
    scope.claim(name)
    left, right = draw.pick((("first", "second"), ("left", "right"), ("old", "new")))
    add = draw.chance(0.5)
    value = f"result.get(key, 0) + {right}[key]" if add else f"{right}[key]"
    body = [
        f"result = dict({left})",
        f"for key in {right}:",
        f"    result[key] = {value}",
        "return result",
    ]
    doc = f"{'Add' if add else 'Copy'} the {right} {items} to the {left} ones."
    parameters = f"{left}: dict[str, int], {right}: dict[str, int]"
    return function(name, parameters, "dict[str, int]", doc, *body)


def tally(scope: Scope) -> str:
    """Write a function that counts words: ``Counter`` or a loop."""
    draw, noun = scope.draw, scope.noun
    items = plural(noun)
    name = f"{draw.pick(('tally', 'count'))}_{items}"
    scope.claim(name)
    if draw.chance(0.5):
        scope.need("from collections import Counter")
        body = [f"return dict(Counter({items}))"]
    else:
        body = [
            "counts: dict[str, int] = {}",
            f"for {noun} in {items}:",
            f"    counts[{noun}] = counts.get({noun}, 0) + 1",
            "return counts",
        ]

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        first, second = inner.several(COLOURS, 2)
        return f"[{quoted([first, second, first])}]", {first: 2, second: 1}

    doc = f"Count how often each {noun} occurs."
    return function(name, f"{items}: list[str]", "dict[str, int]", doc, *body)


def pair(scope: Scope) -> str:
    """Write a function that pairs two lists."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    name = f"{draw.pick(('pair', 'match'))}_names_with_{items}"
    scope.claim(name)
    body = (
        [f"return dict(zip(names, {items}))"]
        if draw.chance(0.4)
        else [f"return {{name: {attribute} for name, {attribute} in zip(names, {items})}}"]
    )

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        people, numbers = inner.several(PEOPLE, 2), inner.numbers(2)
        return f"[{quoted(people)}], {numbers}", dict(zip(people, numbers, strict=True))

    parameters = f"names: list[str], {items}: list[int]"
    doc = f"Map each name to its {attribute}."
    return function(name, parameters, "dict[str, int]", doc, *body)


def describe(scope: Scope) -> str:
    """Write a function that formats a line."""
    draw, attribute = scope.draw, scope.attribute()
    name = f"{draw.pick(('show', 'format', 'describe'))}_{attribute}"
    scope.claim(name)
    mark = draw.pick((": ", " = ", " has "))

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        person, number = inner.pick(PEOPLE), inner.number(1, 9)
        return f'"{person}", {number}', f"{person}{mark}{number}"

    doc = f"Return a line about the {attribute} of a {scope.noun}."
    body = f'return f"{{name}}{mark}{{{attribute}}}"'
    return function(name, f"name: str, {attribute}: int", "str", doc, body)


def parse(scope: Scope) -> str:
    """Write a function that parses a number, with a default for other text."""
    draw, attribute = scope.draw, scope.attribute()
    name = f"{draw.pick(('parse', 'read'))}_{attribute}"
    scope.claim(name)
    bound, value = scope.default()
    body = ["try:", "    return int(text)", "except ValueError:", "    return default"]

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        number = inner.number(1, 9)
        wrong = inner.chance(0.4)
        return ('"' + inner.pick(COLOURS) + '"', value) if wrong else (f'"{number}"', number)

    doc = f"Read the {attribute} of a {scope.noun} from text."
    return function(name, f"text: str, default: int = {bound}", "int", doc, *body)


CONSTANTS = (constant, kinds, table)
TEMPLATES = (sort, rows_total, index, merge, tally, pair, describe, parse)
