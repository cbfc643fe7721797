"""Functions of the standard library's held-out files, as prompts: ``def`` line and docstring."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from falcon_lab.data.corpora import corpus, digest

PER_FILE = 4
"""Functions that one file gives at the most."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def heldout_functions(seed: int) -> Iterator[tuple[str, str]]:
    """``(name, beginning)`` of documented functions of the held-out files, files alternating."""
    files = [
        prompts
        for document in corpus("stdlib", split="heldout", seed=seed)
        if (prompts := beginnings(document.id, document.text or "", seed))
    ]
    for turn in range(PER_FILE):
        yield from (prompts[turn] for prompts in files if turn < len(prompts))


def beginnings(name: str, source: str, seed: int) -> list[tuple[str, str]]:
    """``(name:qualified name, text)`` of some functions of a file, chosen by ``seed``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # a few library files show what must not parse
        return []
    lines = source.splitlines()
    found = {
        f"{name}:{qualified}": beginning(function, lines)
        for qualified, function in _functions(tree, "")
        if has_docstring_and_body(function)
    }
    chosen = sorted(found, key=lambda key: digest(f"{seed}:{key}"))[:PER_FILE]
    return [(key, found[key]) for key in chosen]


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


def has_docstring_and_body(function: Function) -> bool:
    """Whether there is something to say and something left to write."""
    return ast.get_docstring(function) is not None and len(function.body) > 1


def beginning(function: Function, lines: list[str]) -> str:
    """From ``def`` to the end of the docstring, as if at the left margin."""
    end = function.body[0].end_lineno or function.lineno
    return textwrap.dedent("\n".join(lines[function.lineno - 1 : end])) + "\n"
