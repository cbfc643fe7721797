"""Functions over whole numbers and lists of them."""

from __future__ import annotations

from falcon_lab.data.generated.vocabulary import Draw, Scope, function, plural


def keep(scope: Scope) -> str:
    """Write a filter: loop or comprehension, above or below a limit."""
    draw, attribute = scope.draw, scope.attribute()
    items, above = plural(attribute), draw.chance(0.5)
    kind, sign = ("large", draw.pick((">", ">="))) if above else ("small", draw.pick(("<", "<=")))
    name = f"{draw.pick(('keep', 'select', 'find'))}_{kind}_{items}"
    scope.claim(name)
    bound, value = scope.default()
    doc = f"Return the {items} that are {'above' if above else 'below'} the limit."
    test = f"{attribute} {sign} limit"
    loop = [
        "result = []",
        f"for {attribute} in {items}:",
        f"    if {test}:",
        f"        result.append({attribute})",
        "return result",
    ]
    body = draw.pick((loop, [f"return [{attribute} for {attribute} in {items} if {test}]"]))

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        numbers, limit = inner.numbers(inner.number(2, 4)), value
        given = inner.chance(0.5)
        if given:
            limit = inner.number(2, 8)
        kept = [x for x in numbers if compare(x, sign, limit)]
        return f"{numbers}, {limit}" if given else f"{numbers}", kept

    parameters = f"{items}: list[int], limit: int = {bound}"
    return function(name, parameters, "list[int]", doc, *body)


def compare(left: int, sign: str, right: int) -> bool:
    """Return the value of ``left sign right``."""
    return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[sign]


def count(scope: Scope) -> str:
    """Write a counter: loop or generator expression."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    divisor = draw.number(2, 4)
    what = {2: "even", 3: "triple", 4: "quarter"}[divisor]
    name = f"count_{what}_{items}"
    scope.claim(name)
    test = f"{attribute} % {divisor} == 0"
    loop = [
        "count = 0",
        f"for {attribute} in {items}:",
        f"    if {test}:",
        "        count += 1",
        "return count",
    ]
    body = draw.pick((loop, [f"return sum(1 for {attribute} in {items} if {test})"]))

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        numbers = inner.numbers(inner.number(2, 4))
        return f"{numbers}", sum(x % divisor == 0 for x in numbers)

    doc = f"Count the {items} that {divisor} divides."
    return function(name, f"{items}: list[int]", "int", doc, *body)


def extreme(scope: Scope) -> str:
    """Write a function for the largest or smallest, by loop or built-in."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    word, sign, builtin = draw.pick((("highest", ">", max), ("lowest", "<", min)))
    name = f"{word}_{attribute}"
    scope.claim(name)
    loop = [
        f"best = {items}[0]",
        f"for {attribute} in {items}:",
        f"    if {attribute} {sign} best:",
        f"        best = {attribute}",
        "return best",
    ]
    body = draw.pick((loop, [f"return {builtin.__name__}({items})"]))

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        numbers = inner.numbers(3)
        return f"{numbers}", builtin(numbers)

    doc = f"Return the {word} {attribute} of a {scope.noun}."
    return function(name, f"{items}: list[int]", "int", doc, *body)


def total(scope: Scope) -> str:
    """Write a running sum, with or without a factor."""
    draw, attribute = scope.draw, scope.attribute()
    items, factor = plural(attribute), draw.number(1, 3)
    name = f"{draw.pick(('add', 'sum', 'combine'))}_{items}"
    scope.claim(name)
    term = attribute if factor == 1 else f"{factor} * {attribute}"
    body = (
        ["result = 0", f"for {attribute} in {items}:", f"    result += {term}", "return result"]
        if draw.chance(0.6)
        else [f"return sum({items})" if factor == 1 else f"return {factor} * sum({items})"]
    )

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        numbers = inner.numbers(3)
        return f"{numbers}", factor * sum(numbers)

    doc = f"Add up the {items} of all {plural(scope.noun)}."
    return function(name, f"{items}: list[int]", "int", doc, *body)


def average(scope: Scope) -> str:
    """Write a function for a mean that guards against no values."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    name = f"{draw.pick(('average', 'mean'))}_{attribute}"
    scope.claim(name)
    guard = (
        [f"if not {items}:", f'    raise ValueError("no {items} given")']
        if draw.chance(0.5)
        else [f"if not {items}:", "    return 0.0"]
    )

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        middle, step = inner.number(4, 9), inner.number(1, 3)
        return f"{[middle - step, middle + step]}", float(middle)

    doc = f"Return the mean {attribute} of the {plural(scope.noun)}."
    body = [*guard, f"return sum({items}) / len({items})"]
    return function(name, f"{items}: list[int]", "float", doc, *body)


def scale(scope: Scope) -> str:
    """Write a map over a list."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    verb, sign = draw.pick((("scale", "*"), ("raise", "+"), ("lower", "-")))
    name, parameter = f"{verb}_{items}", draw.pick(("factor", "step"))
    scope.claim(name)
    bound, value = scope.default()

    @scope.example(name, numbers=True)
    def _(inner: Draw) -> tuple[str, object]:
        numbers = inner.numbers(inner.number(2, 3))
        results = {"*": [x * value for x in numbers], "+": [x + value for x in numbers]}
        return f"{numbers}", results.get(sign, [x - value for x in numbers])

    parameters = f"{items}: list[int], {parameter}: int = {bound}"
    body = f"return [{attribute} {sign} {parameter} for {attribute} in {items}]"
    return function(name, parameters, "list[int]", f"{verb.capitalize()} all {items}.", body)


def clamp(scope: Scope) -> str:
    """Write a function that forces a value into a range."""
    draw, attribute = scope.draw, scope.attribute()
    name = f"{draw.pick(('clamp', 'limit', 'bound'))}_{attribute}"
    scope.claim(name)
    low, high = draw.number(0, 3), draw.number(6, 9)
    loop = [
        f"if {attribute} < low:",
        "    return low",
        f"if {attribute} > high:",
        "    return high",
        f"return {attribute}",
    ]
    body = draw.pick((loop, [f"return max(low, min({attribute}, high))"]))

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        number = inner.number(0, 12)
        return f"{number}", max(low, min(number, high))

    parameters = f"{attribute}: int, low: int = {low}, high: int = {high}"
    doc = f"Keep the {attribute} between low and high."
    return function(name, parameters, "int", doc, *body)


def check(scope: Scope) -> str:
    """Write a guard that raises ValueError."""
    draw, attribute = scope.draw, scope.attribute()
    name = f"{draw.pick(('check', 'validate', 'require'))}_{attribute}"
    scope.claim(name)
    bound, value = scope.default()
    low = draw.chance(0.5)
    test, fault = ("< 0", "negative") if low else (f"> {bound}", "too large")
    body = [
        f"if {attribute} {test}:",
        f'    raise ValueError(f"{attribute} is {fault}: {{{attribute}}}")',
        f"return {attribute}",
    ]

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        number = inner.number(0, 9 if low else value)
        return f"{number}", number

    doc = f"Return the {attribute} unless it is {fault}."
    return function(name, f"{attribute}: int", "int", doc, *body)


def shrink(scope: Scope) -> str:
    """Write a while loop that counts its steps."""
    draw, attribute = scope.draw, scope.attribute()
    divisor = draw.number(2, 3)
    name = f"{draw.pick(('steps', 'rounds'))}_to_shrink_{attribute}"
    scope.claim(name)
    body = [
        "steps = 0",
        f"while {attribute} > 1:",
        f"    {attribute} //= {divisor}",
        "    steps += 1",
        "return steps",
    ]

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        power = inner.number(1, 4)
        return f"{divisor**power}", power

    doc = f"Count how often the {attribute} can be divided by {divisor}."
    return function(name, f"{attribute}: int", "int", doc, *body)


def recurse(scope: Scope) -> str:
    """Write a recursion on a whole number."""
    draw = scope.draw
    verb, sign, start = draw.pick((("multiply", "*", 1), ("add", "+", 0)))
    name = f"{verb}_{plural(scope.attribute())}_down"
    scope.claim(name)
    body = ["if step == 0:", f"    return {start}", f"return step {sign} {name}(step - 1)"]

    @scope.example(name)
    def _(inner: Draw) -> tuple[str, object]:
        step, result = inner.number(1, 4), start
        for number in range(1, step + 1):
            result = result * number if sign == "*" else result + number
        return f"{step}", result

    what = "product" if sign == "*" else "sum"
    return function(name, "step: int", "int", f"Return the {what} of all steps.", *body)


TEMPLATES = (keep, count, extreme, total, average, scale, clamp, check, shrink, recurse)
