"""Classes: plain, data, containers, enumerations and exceptions."""

from __future__ import annotations

from falcon_lab.data.generated.vocabulary import COLOURS, KINDS, Scope, Shape, function, plural


def method(name: str, parameters: str, returns: str, doc: str, *body: str) -> str:
    """Return the text of a method, indented."""
    given = f"self, {parameters}" if parameters else "self"
    text = function(name, given, returns, doc, *body)
    return "\n".join("    " + line for line in text.split("\n"))


def methods(scope: Scope, first: str, second: str) -> list[str]:
    """Return an adder for ``first`` and up to one more method over both attributes."""
    draw, noun = scope.draw, scope.noun
    guard = [f"if {first} < 0:", f'    raise ValueError("{first} is negative")']
    adder = method(
        f"add_{first}",
        f"{first}: int",
        "None",
        f"Add to the {first} of the {noun}.",
        *(guard if draw.chance(0.4) else []),
        f"self.{first} += {first}",
    )
    sign, word = draw.pick((("*", "product"), ("+", "sum"), ("-", "rest")))
    others = (
        method(word, "", "int", "", f"return self.{first} {sign} self.{second}"),
        method(f"has_{second}", "", "bool", "", f"return self.{second} > 0"),
        method("__repr__", "", "str", "", f'return f"{scope.title}({{self.{first}}})"'),
        method("copy", "", f'"{scope.title}"', "", f"return {scope.title}(self.{first})"),
    )
    return [adder, draw.pick(others)] if draw.chance(0.6) else [adder]


def plain(scope: Scope) -> str:
    """Write a class with ``__init__`` and methods that use its attributes."""
    draw, noun = scope.draw, scope.noun
    first, second = draw.several(scope.attributes, 2)
    scope.claim(scope.title)
    scope.shapes.append(Shape(scope.title, (first, second), f"add_{first}", first))
    parts = [
        method(
            "__init__",
            f"{first}: int, {second}: int = {draw.number(0, 3)}",
            "None",
            "",
            f"self.{first} = {first}",
            f"self.{second} = {second}",
        ),
        *methods(scope, first, second),
    ]
    doc = draw.pick((f"A {noun} with a {first} and a {second}.", f"One {noun} and its {first}."))
    return f'class {scope.title}:\n    """{doc}"""\n\n' + "\n\n".join(parts)


def data(scope: Scope) -> str:
    """Write a dataclass."""
    draw = scope.draw
    first, second = draw.several(scope.attributes, 2)
    scope.claim(scope.title)
    scope.need("from dataclasses import dataclass")
    scope.shapes.append(Shape(scope.title, (first, second), f"add_{first}", first))
    fields = [f"    {first}: int", f"    {second}: int = {draw.number(0, 3)}"]
    head = (
        f'@dataclass\nclass {scope.title}:\n    """The {first} and {second} of a {scope.noun}."""'
    )
    return head + "\n\n" + "\n".join(fields) + "\n\n" + "\n\n".join(methods(scope, first, second))


def container(scope: Scope) -> str:
    """Write a collection with ``add`` and what it knows of its members."""
    draw, attribute = scope.draw, scope.attribute()
    items = plural(attribute)
    name = f"{scope.title}{draw.pick(('List', 'Store', 'Book'))}"
    scope.claim(name)
    extras = (
        method("__len__", "", "int", "", f"return len(self.{items})"),
        method("total", "", "int", "", f"return sum(self.{items})"),
        method("highest", "", "int", "", f"return max(self.{items})"),
        method("clear", "", "None", "", f"self.{items} = []"),
    )
    parts = [
        method("__init__", "", "None", "", f"self.{items}: list[int] = []"),
        method("add", f"{attribute}: int", "None", "", f"self.{items}.append({attribute})"),
        *draw.several(extras, draw.number(1, 2)),
    ]
    head = f'class {name}:\n    """The {items} of all {plural(scope.noun)}."""'
    return head + "\n\n" + "\n\n".join(parts)


def enumeration(scope: Scope) -> str:
    """Write an ``Enum``."""
    draw = scope.draw
    suffix, words = draw.pick((("Colour", COLOURS), ("State", KINDS)))
    name = f"{scope.title}{suffix}"
    scope.claim(name)
    scope.need("from enum import Enum")
    chosen = draw.several(words, draw.number(2, 4))
    text = draw.chance(0.5)
    members = [
        f'    {word.upper()} = "{word}"' if text else f"    {word.upper()} = {number}"
        for number, word in enumerate(chosen, start=1)
    ]
    head = f'class {name}(Enum):\n    """The {suffix.lower()} of a {scope.noun}."""'
    return head + "\n\n" + "\n".join(members)


def fault(scope: Scope) -> str:
    """Write an exception and the function that raises it."""
    draw, attribute = scope.draw, scope.attribute()
    error, name = f"{scope.title}Error", f"ensure_{attribute}"
    scope.claim(error)
    scope.claim(name)
    bound, _ = scope.default()
    sign, fault = draw.pick(((">", "too large"), ("<", "too small")))
    body = function(
        name,
        f"{attribute}: int",
        "None",
        "",
        f"if {attribute} {sign} {bound}:",
        f'    raise {error}("{attribute} is {fault}")',
    )
    head = f'class {error}(ValueError):\n    """Raised when the {attribute} is {fault}."""'
    return f"{head}\n\n\n{body}"


TEMPLATES = (plain, plain, data, data, container, enumeration, fault)
