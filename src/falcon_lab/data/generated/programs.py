"""Files, generators, programs, and the tests of what a module defines."""

from __future__ import annotations

from falcon_lab.data.generated.vocabulary import Scope, Unfit, function, plural


def read(scope: Scope) -> str:
    """Write a function that reads a file: lines, numbers or JSON."""
    draw = scope.draw
    noun, attribute = scope.noun, scope.attribute()
    form = draw.pick(("lines", "numbers", "json"))
    items = plural(attribute) if form == "numbers" else plural(noun)
    name = f"{draw.pick(('read', 'load'))}_{items}"
    scope.claim(name)
    opening = 'with open(path, encoding="utf-8") as file:'
    if form == "json":
        scope.need("import json")
        body, returns = [opening, "    return json.load(file)"], "list[dict[str, int]]"
    elif form == "numbers":
        body, returns = [opening, "    return [int(line) for line in file]"], "list[int]"
    else:
        body = [f"{items} = []", opening, "    for line in file:", "        if line.strip():"]
        body += [f"            {items}.append(line.strip())", f"return {items}"]
        returns = "list[str]"
    return function(name, "path: str", returns, f"Read the {items} from a file.", *body)


def write(scope: Scope) -> str:
    """Write a function that writes a file."""
    draw, noun = scope.draw, scope.noun
    items = plural(noun)
    name = f"{draw.pick(('write', 'save'))}_{items}"
    scope.claim(name)
    opening = 'with open(path, "w", encoding="utf-8") as file:'
    if draw.chance(0.5):
        scope.need("import json")
        body = [opening, f"    json.dump({items}, file)"]
    else:
        body = [opening, f"    for {noun} in {items}:", f'        file.write(f"{{{noun}}}\\n")']
    parameters = [f"{items}: list[str]", "path: str"]
    order = parameters if draw.chance(0.5) else parameters[::-1]
    return function(name, ", ".join(order), "None", f"Write the {items} to a file.", *body)


def iterate(scope: Scope) -> str:
    """Write a generator that lets some items pass."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    name = f"{draw.pick(('iter', 'each', 'walk'))}_{items}"
    scope.claim(name)
    scope.need("from collections.abc import Iterator")
    bound, _ = scope.default()
    test = draw.pick((f"{attribute} > {bound}", f"{attribute} < {bound}", f"{attribute} != 0"))
    body = [f"for {attribute} in {items}:", f"    if {test}:", f"        yield {attribute}"]
    doc = f"Yield the {items} one after the other."
    return function(name, f"{items}: list[int]", "Iterator[int]", doc, *body)


def batches(scope: Scope) -> str:
    """Write a generator of slices."""
    draw = scope.draw
    items = plural(scope.noun)
    name = f"{draw.pick(('split', 'batch'))}_{items}"
    scope.claim(name)
    scope.need("from collections.abc import Iterator")
    bound, _ = scope.default()
    body = [
        f"for start in range(0, len({items}), size):",
        f"    yield {items}[start : start + size]",
    ]
    parameters = f"{items}: list[str], size: int = {bound}"
    doc = f"Yield the {items} in groups."
    return function(name, parameters, "Iterator[list[str]]", doc, *body)


def main(scope: Scope) -> str:
    """Write a small program over the functions above it."""
    draw = scope.draw
    ready = [example for example in scope.examples if example.numbers]
    if not ready:
        raise Unfit
    scope.claim("main")
    chosen = draw.several(ready, min(len(ready), draw.number(1, 2)))
    items = plural(scope.attribute())
    scope.need("import sys")
    body = [f"{items} = [int(word) for word in sys.argv[1:]]"]
    body += [f"print({example.name}({items}))" for example in chosen]
    text = function("main", "", "None", f"Print what is known of the {items}.", *body)
    return f'{text}\n\n\nif __name__ == "__main__":\n    main()'


def function_test(scope: Scope) -> str:
    """Write a test of a function defined above."""
    draw = scope.draw
    if not scope.examples:
        raise Unfit
    example = draw.pick(scope.examples)
    name = f"test_{example.name}"
    scope.claim(name)
    body = []
    for _ in range(draw.number(1, 2)):
        arguments, value = example.draw(draw)
        body.append(f"assert {example.name}({arguments}) {literal(value)}")
    return function(name, "", "None", "", *dict.fromkeys(body))


def literal(value: object) -> str:
    """Return the right side of an assertion that something is ``value``."""
    if isinstance(value, bool):
        return f"is {value}"
    if isinstance(value, str):
        return f'== "{value}"'
    return "== " + repr(value).replace("'", '"')


def class_test(scope: Scope) -> str:
    """Write a test of a class defined above."""
    draw = scope.draw
    if not scope.shapes:
        raise Unfit
    shape = draw.pick(scope.shapes)
    name = f"test_{shape.adder}"
    scope.claim(name)
    start, more, instance = draw.number(1, 9), draw.number(1, 9), scope.noun
    body = [
        f"{instance} = {shape.name}({start})",
        f"{instance}.{shape.adder}({more})",
        f"assert {instance}.{shape.target} == {start + more}",
    ]
    return function(name, "", "None", "", *body)


TEMPLATES = (read, write, iterate, batches)
ENDINGS = (function_test, function_test, class_test, main)
